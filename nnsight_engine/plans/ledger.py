"""Captured bytes, counted before they are allocated.

Each live request owes what it has captured so far; the sum over the live requests is the
engine's. A request that would pass either limit fails with what it asked for and what it
may. The worker reserves at each step and releases once, when the request ends. Steps of a
run reserve for all its requests together (``steady_run``).
"""

from __future__ import annotations

import sys

from nnsight_engine.core.errors import InterventionError


class ByteLedger:
    """Counts captured bytes per request and over all of them.

    Args:
        max_request_bytes: Most that one request may capture in its life.
        max_engine_bytes: Most that all live requests may hold together.
    """

    def __init__(self, *, max_request_bytes: int, max_engine_bytes: int) -> None:
        """Start empty."""
        self._max_request_bytes = max_request_bytes
        self._max_engine_bytes = max_engine_bytes
        self._held: dict[str, int] = {}
        self.total_bytes = 0

    def reserve(self, request_id: str, num_bytes: int) -> None:
        """Count ``num_bytes`` more for the request, or raise InterventionError and count nothing."""
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
        """Count bytes for several requests together, whose own limits leave room; False over the engine's.

        They become the requests' own by ``assign``, or free again by ``give_back_all``.
        """
        if self.total_bytes + num_bytes > self._max_engine_bytes:
            return False
        self.total_bytes += num_bytes
        return True

    def give_back_all(self, num_bytes: int) -> None:
        """Count fewer bytes for several requests together."""
        self.total_bytes -= num_bytes

    def assign(self, request_id: str, num_bytes: int) -> None:
        """Make bytes a request's own that were counted for several together."""
        self._held[request_id] = self._held.get(request_id, 0) + num_bytes

    def num_steps(self, request_id: str, kept: int, scratch: int) -> int:
        """Return how many steps a request's limit leaves room for.

        Args:
            request_id: The request.
            kept: Bytes that it keeps of each.
            scratch: Bytes that it needs beside while one runs.
        """
        room = self._max_request_bytes - self._held.get(request_id, 0) - scratch
        if room < kept:
            return 0
        return room // kept if kept else sys.maxsize

    def give_back(self, request_id: str, num_bytes: int) -> None:
        """Count ``num_bytes`` less for the request: scratch memory that is free again."""
        if request_id in self._held:
            self._held[request_id] -= num_bytes
            self.total_bytes -= num_bytes

    def release(self, request_id: str) -> None:
        """Forget the request; one that never captured is no error."""
        self.total_bytes -= self._held.pop(request_id, 0)
