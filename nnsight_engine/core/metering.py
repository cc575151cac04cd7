"""Usage of the engine by one request. Numbers only grow; usage counts even if the request fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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


__all__ = ["UsageMeter"]
