"""Placement of traces on data-parallel engines: the state of a trace is in the workers of one engine."""

from __future__ import annotations

from collections.abc import Sequence


class TracePlacement:
    def __init__(self, num_engines: int) -> None:
        self._num_requests = [0] * num_engines
        self._placed: dict[str, tuple[int, int]] = {}
        self._next = 0

    def place(self, key: str, num_requests: int, in_flight: Sequence[int]) -> None:
        """Place a trace on the engine with the fewest requests, by ``in_flight``; equal ones take turns."""
        num_engines = len(self._num_requests)
        in_turn = [(self._next + one) % num_engines for one in range(num_engines)]
        # A request is in one of the counts before it is sent, and in both afterwards.
        rank = min(in_turn, key=lambda one: max(in_flight[one], self._num_requests[one]))
        self._next = (rank + 1) % num_engines
        self._num_requests[rank] += num_requests
        self._placed[key] = rank, num_requests

    def rank(self, key: str) -> int:
        return self._placed[key][0]

    def remove(self, key: str) -> None:
        rank, num_requests = self._placed.pop(key, (0, 0))
        self._num_requests[rank] -= num_requests


__all__ = ["TracePlacement"]
