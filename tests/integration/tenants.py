"""A server with keys, for tests of what each opens."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import httpx

from api_schemas.administration import NewKey, Scope, Tier

if TYPE_CHECKING:
    from tests.integration.conftest import Server


class Tenants:
    """A server with keys; the first is an operator's."""

    def __init__(self, server: Server) -> None:
        self.server = server

    async def headers(
        self, tenant: str, *scopes: Scope, tier: Tier = Tier.TRUSTED, **rest: Any
    ) -> dict[str, str]:
        new = NewKey(tenant=tenant, scopes=scopes or tuple(Scope), tier=tier, **rest)
        return {"authorization": f"Bearer {(await self.server.context.keys.create(new)).key}"}

    async def send(
        self, method: str, path: str, headers: dict[str, str] | None = None, **rest: Any
    ) -> httpx.Response:
        return await self.server.client.request(method, path, headers=headers, **rest)

    async def open_socket(self, path: str, headers: Mapping[str, str]) -> httpx.Response:
        """Begin a WebSocket and hang up; returns what it was refused with, or 101."""
        raw = [
            (name.encode(), value.encode("latin-1"))
            for name, value in {"host": "localhost", **headers}.items()
        ]
        scope = {
            "type": "websocket", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "ws",
            "server": ("localhost", 80), "client": ("127.0.0.1", 1), "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "headers": raw, "subprotocols": [], "state": {},
            "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        sent: list[MutableMapping[str, Any]] = []
        to_say: list[MutableMapping[str, Any]] = [
            {"type": "websocket.connect"},
            {"type": "websocket.disconnect", "code": 1000},
        ]

        async def receive() -> MutableMapping[str, Any]:
            return to_say.pop(0)

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await self.server.app(scope, receive, send)
        if sent[0]["type"] == "websocket.accept":
            return httpx.Response(101)
        start = sent[0]
        assert start["type"] == "websocket.http.response.start", sent
        return httpx.Response(start["status"], headers=start["headers"], content=sent[1]["body"])
