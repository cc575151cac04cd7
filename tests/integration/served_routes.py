"""Every route of the server, with the scopes that it asks for: its document says them.

WebSockets are not in it; theirs are read off the routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import Route

from api_schemas.administration import Scope
from app.routes.parameters import ANY_CALLER
from tests.integration import serving

SOCKET: Final = "WS"


@dataclasses.dataclass(frozen=True)
class Served:
    """A route; ``scopes`` is None where it asks for no key."""

    method: str
    path: str
    scopes: tuple[Scope, ...] | None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def _scopes_of(dependant: Dependant) -> list[str] | None:
    found = [scopes for one in dependant.dependencies if (scopes := _scopes_of(one)) is not None]
    if dependant.call is ANY_CALLER.dependency:
        found.append(dependant.oauth_scopes or [])
    return found[0] if found else None


def _all() -> Iterator[Served]:
    app = serving.Application(Path("never started")).app
    documented = app.openapi()["paths"]
    for route in app.routes:
        if isinstance(route, APIWebSocketRoute):
            scopes = _scopes_of(route.dependant)
            yield Served(SOCKET, route.path, None if scopes is None else tuple(map(Scope, scopes)))
            continue
        assert isinstance(route, Route | APIRoute), f"what is {route!r}?"
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = documented.get(route.path_format, {}).get(method.lower(), {})
            asked = operation.get("security")
            scopes = None if asked is None else asked[0]["key"]
            yield Served(method, route.path_format, None if scopes is None else tuple(map(Scope, scopes)))


ROUTES: Final = list(_all())
