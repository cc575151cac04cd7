"""What one request uses of an engine, for whoever counts it: tokens, bytes that leave, seconds of its time.

Whoever serves a request sets ``METER`` in its context before the engine is asked; what runs on its behalf,
tasks included, finds it there and notes what it used. Without a meter nothing is noted. Numbers only grow,
and what was used stays used when the request fails or its client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

_LATE_S: Final = 60.0
"""What has not ended so long after its request is not counted."""


class UsageMeter:
    """What one request has used so far.

    Attributes:
        key_id: The key that it came with; empty without one.
        captured_bytes: Bytes of captures and saves that left the engine.
        intervention_s: Seconds that its operations and blocks had the engine to themselves.
    """

    __slots__ = ("_counters", "_late", "captured_bytes", "intervention_s", "key_id", "noted_tokens")

    def __init__(self, key_id: str = "") -> None:
        """Begin with nothing."""
        self.key_id = key_id
        self.captured_bytes = 0
        self.intervention_s = 0.0
        self.noted_tokens = 0
        self._counters: list[Callable[[], int]] = []
        self._late: list[asyncio.Future[Any]] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompts, and those generated for it."""
        return self.noted_tokens + sum(count() for count in self._counters)

    def watch(self, num_tokens: Callable[[], int]) -> None:
        """Count the tokens of something that goes on; it is asked when somebody wants to know."""
        self._counters.append(num_tokens)

    def expect(self, doing: asyncio.Future[Any]) -> None:
        """Have whoever counts wait for something that may still add to it, after the request is over."""
        self._late.append(doing)

    async def settled(self) -> None:
        """Wait until nothing is added any more, but not for ever; the request itself must be over."""
        if self._late:
            await asyncio.wait(self._late, timeout=_LATE_S)


METER: Final[ContextVar[UsageMeter | None]] = ContextVar("nnsight_engine_meter", default=None)
"""The meter of the request on whose behalf this code runs."""

__all__ = ["METER", "UsageMeter"]
