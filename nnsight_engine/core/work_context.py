"""The part of a request's context that the engine reads: whose work it does, where its usage is recorded.

vLLM's serving classes pass on nothing of ours, so a context variable carries the object to the engine: the
only one beside the call of ``async_engine.carrying``. Only ``working_for`` sets it, in the task that serves a
request or runs a job. Everything else receives the object, or the fields that it needs, as arguments. Numbers
of usage only grow, and count even if the request fails.

Counters of an engine since its start; they only grow, and become smaller only when it was restarted.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final

_LATE_S: Final = 60.0
"""Seconds after the end of a request within which late usage is still counted."""


class UsageMeter:
    """The usage of one request so far.

    Attributes:
        captured_bytes: Bytes of captures and saves that left the engine.
        intervention_s: Seconds during which its operations and blocks had the engine to themselves.
    """

    __slots__ = (
        "__weakref__", "_counters", "_late", "captured_bytes", "finish_reasons", "intervention_s", "key_id",
        "noted_tokens", "prompt_tokens",
    )  # fmt: skip

    def __init__(self, key_id: str = "") -> None:
        self.key_id = key_id
        self.captured_bytes = 0
        self.intervention_s = 0.0
        self.prompt_tokens = 0
        self.noted_tokens = 0
        self.finish_reasons: list[str] = []
        self._counters: list[Callable[[], int]] = []
        self._late: list[asyncio.Future[Any]] = []

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def output_tokens(self) -> int:
        return self.noted_tokens + sum(count() for count in self._counters)

    def watch(self, output_tokens: Callable[[], int]) -> None:
        """Register a function that returns the tokens of an ongoing generation; it is called on each read."""
        self._counters.append(output_tokens)

    def expect(self, doing: asyncio.Future[Any]) -> None:
        """Register a future that may still add usage after the request is over; ``settled`` waits for it."""
        self._late.append(doing)

    async def settled(self) -> None:
        """Wait until no more usage can be added, for a limited time; call it after the request is over."""
        if self._late:
            await asyncio.wait(self._late, timeout=_LATE_S)


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
        if self.tier != EAGER:
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


PLAIN: Final = "plain"
GRAPH: Final = "graph"
TAP: Final = "tap"
EAGER: Final = "eager"
TIERS: Final = (PLAIN, GRAPH, TAP, EAGER)
"""How a step ran: without interventions, with those in one CUDA graph, with those at taps between compiled
pieces, or with uncompiled modules and hooks."""

SANDBOX_EVENTS: Final = ("started", "killed", "refused")
"""Sandbox events: a trace got a process, a process was killed before its end, no process was available."""

STEP_BUCKETS_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
    10.0,
)
"""Upper bounds of the histogram of seconds that interventions took in one step; the last bucket has none."""


@dataclasses.dataclass(slots=True)
class EngineCounts:
    """Counters of one engine; ``intervention_buckets`` counts steps by duration, see ``STEP_BUCKETS_S``."""

    steps: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    intervention_buckets: list[int] = dataclasses.field(
        default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1)
    )
    intervention_s: float = 0.0
    sandboxes: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SANDBOX_EVENTS, 0))

    def note_time(self, seconds: float) -> None:
        self.intervention_buckets[bisect.bisect_left(STEP_BUCKETS_S, seconds)] += 1
        self.intervention_s += seconds

    def to_plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> EngineCounts:
        return cls(**plain)

    @classmethod
    def total(cls, counts: Iterable[EngineCounts]) -> EngineCounts:
        total = cls()
        for count in counts:
            for name, number in count.steps.items():
                total.steps[name] += number
            for name, number in count.sandboxes.items():
                total.sandboxes[name] += number
            total.intervention_buckets = list(
                map(operator.add, total.intervention_buckets, count.intervention_buckets)
            )
            total.intervention_s += count.intervention_s
        return total
