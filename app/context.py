"""What routes need of their server, and how they get it: through the application, never a global."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Final
from urllib.parse import urlsplit

from fastapi import Depends, WebSocketException
from starlette.requests import HTTPConnection

from api_schemas.errors import ApiError
from app.engine.client import EngineClient
from app.engine.trace_processes import TraceProcesses
from app.lifecycle import Lifecycle
from app.services.code_policy import check_name
from app.services.jobs import JobService
from app.services.traces import TraceService
from app.settings import Settings
from app.storage.results import ResultStore

_MAX_REASON: Final = 100
"""Characters of why a WebSocket is closed; there is room for 123 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The parts of one server; two servers in one process have one each."""

    settings: Settings
    engine: EngineClient
    store: ResultStore
    lifecycle: Lifecycle
    traces: TraceService
    jobs: JobService
    processes: Sequence[TraceProcesses] = ()


async def _context_of(connection: HTTPConnection) -> Context:
    context: Context = connection.app.state.context
    return context


async def _owner_of(connection: HTTPConnection) -> str:
    settings: Settings = connection.app.state.context.settings
    if connection.scope["type"] == "websocket":
        _check_origin(connection)
    try:
        check_name(settings, connection)
    except ApiError as error:
        if connection.scope["type"] == "websocket":
            raise WebSocketException(1008, error.message[:_MAX_REASON]) from error
        raise
    return ""


def _check_origin(connection: HTTPConnection) -> None:
    """Refuse pages of other places, which browsers let open WebSockets to anywhere."""
    origin = connection.headers.get("origin")
    if origin is not None and urlsplit(origin).hostname != connection.url.hostname:
        raise WebSocketException(1008, "pages of other places may not listen to jobs")


Owner = Annotated[str, Depends(_owner_of)]
"""A route's parameter: whose jobs the caller's are. Nobody is told apart yet, and all share one name."""

Served = Annotated[Context, Depends(_context_of)]
"""A route's parameter that receives the server's parts."""
