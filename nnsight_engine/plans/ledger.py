"""Captured bytes, counted before they are allocated.

Each live request owes what it has captured so far; the sum over the live requests is the
engine's. A request that would pass either limit fails with what it asked for and what it
may. The worker reserves at each step and releases once, when the request ends.
"""

from __future__ import annotations

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

    def give_back(self, request_id: str, num_bytes: int) -> None:
        """Count ``num_bytes`` less for the request: scratch memory that is free again."""
        if request_id in self._held:
            self._held[request_id] -= num_bytes
            self.total_bytes -= num_bytes

    def release(self, request_id: str) -> None:
        """Forget the request; one that never captured is no error."""
        self.total_bytes -= self._held.pop(request_id, 0)
