"""Accounting of captured bytes, reserved before they are allocated.

A request that would exceed its own or the engine's limit fails.
"""

from __future__ import annotations

import dataclasses
import sys

from nnsight_engine.core.errors import InterventionError


@dataclasses.dataclass(slots=True)
class StepBytes:
    """Bytes of one request's reads in one step: ``kept`` until it ends, ``scratch`` during the step."""

    kept: int = 0
    scratch: int = 0


class ByteLedger:
    def __init__(self, *, max_request_bytes: int, max_engine_bytes: int) -> None:
        self._max_request_bytes = max_request_bytes
        self._max_engine_bytes = max_engine_bytes
        self._held: dict[str, int] = {}
        self.total_bytes = 0

    def reserve(self, request_id: str, num_bytes: int) -> None:
        """Add ``num_bytes`` to the request's count, or raise InterventionError and count nothing."""
        held = self._held.get(request_id, 0)
        if held + num_bytes > self._max_request_bytes:
            raise InterventionError(
                "capture_too_large",
                f"one request may capture {self._max_request_bytes} bytes, this one asked for "
                f"{held + num_bytes}; capture fewer points or positions, or use `reduce`",
            )
        if self.total_bytes + num_bytes > self._max_engine_bytes:
            raise InterventionError(
                "engine_capture_full",
                f"all requests together may hold {self._max_engine_bytes} captured bytes, "
                f"{self.total_bytes} are held and this request asked for {num_bytes} more; try again later",
            )
        self._held[request_id] = held + num_bytes
        self.total_bytes += num_bytes

    def reserve_all(self, num_bytes: int) -> bool:
        """Reserve bytes for several requests, within their own limits; False beyond the engine's limit."""
        if self.total_bytes + num_bytes > self._max_engine_bytes:
            return False
        self.total_bytes += num_bytes
        return True

    def give_back_all(self, num_bytes: int) -> None:
        self.total_bytes -= num_bytes

    def assign(self, request_id: str, num_bytes: int) -> None:
        """Attribute bytes to a request that were reserved for several requests together."""
        self._held[request_id] = self._held.get(request_id, 0) + num_bytes

    def num_steps(self, request_id: str, kept: int, scratch: int) -> int:
        """Return how many more steps fit into the request's limit; ``scratch`` is free again after each."""
        room = self._max_request_bytes - self._held.get(request_id, 0) - scratch
        if room < kept:
            return 0
        return room // kept if kept else sys.maxsize

    def give_back(self, request_id: str, num_bytes: int) -> None:
        if request_id in self._held:
            self._held[request_id] -= num_bytes
            self.total_bytes -= num_bytes

    def release(self, request_id: str) -> None:
        """Release all bytes of the request; a request that never captured is no error."""
        self.total_bytes -= self._held.pop(request_id, 0)
