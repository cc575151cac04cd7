"""What routes need of their server, and how they get it: through the application, never a global."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from app.engine.client import EngineClient
from app.engine.trace_processes import TraceProcesses
from app.lifecycle import Lifecycle
from app.services.jobs import JobService
from app.services.traces import TraceService
from app.settings import Settings
from app.storage.results import ResultStore


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


async def _owner_of() -> str:
    return ""


Owner = Annotated[str, Depends(_owner_of)]
"""A route's parameter: whose jobs the caller's are. Nobody is told apart yet, and all share one name."""

Served = Annotated[Context, Depends(_context_of)]
"""A route's parameter that receives the server's parts."""
