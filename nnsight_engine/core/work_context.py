"""The part of a request's context that the engine reads: whose work it does, where its usage is recorded.

vLLM's serving classes pass on nothing of ours, so a context variable carries the object to the engine: the
only one beside the call of ``async_engine.carrying``. Only ``working_for`` sets it, in the task that serves a
request or runs a job. Everything else receives the object, or the fields that it needs, as arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Final

from nnsight_engine.core.metering import UsageMeter

_EAGER: Final = "eager"


@dataclasses.dataclass(slots=True, kw_only=True)
class WorkContext:
    """A request, or a run of a job, as the engine knows it.

    Attributes:
        tenant: Empty on a server without keys.
        trace_headers: The W3C trace context that spans continue; None where no spans are recorded.
        tier: How its steps ran, once known: ``tap`` or ``eager``.
        marked: Choices that ``flag`` operations marked or ``stop`` operations ended, with the kind of each.
    """

    tenant: str = ""
    meter: UsageMeter = dataclasses.field(default_factory=UsageMeter)
    trace_headers: Mapping[str, str] | None = None
    tier: str = ""
    presets: tuple[str, ...] = ()
    marked: set[tuple[str, int]] = dataclasses.field(default_factory=set)

    def note_tier(self, tier: str) -> None:
        """Record how steps ran; ``eager`` takes precedence over ``tap``."""
        if self.tier != _EAGER:
            self.tier = tier


_CURRENT: Final[ContextVar[WorkContext | None]] = ContextVar("nnsight_engine_work", default=None)


def current_work() -> WorkContext | None:
    return _CURRENT.get()


def tenant_served() -> str:
    work = _CURRENT.get()
    return "" if work is None else work.tenant


@contextlib.contextmanager
def working_for(context: WorkContext) -> Iterator[None]:
    """Make a context the current one, in the block and in the tasks started in it."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)


__all__ = ["WorkContext", "current_work", "tenant_served", "working_for"]
