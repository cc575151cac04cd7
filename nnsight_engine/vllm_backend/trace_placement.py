"""Placement of traces on the engines of ``--data-parallel-size``: one engine runs all requests of a trace.

The engines share nothing, and vLLM chooses one for each request by itself. A trace has state in the workers
of its engine: blocks sent ahead of the requests, values that blocks share, results that wait to be collected.
"""

from __future__ import annotations

from collections.abc import Sequence


class TracePlacement:
    """The engine of each open trace, by its rank.

    Args:
        num_engines: The number of engines.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_requests = [0] * num_engines
        self._placed: dict[str, tuple[int, int]] = {}
        self._next = 0

    def place(self, key: str, num_requests: int, in_flight: Sequence[int]) -> None:
        """Place a trace on the engine with the fewest requests; equal ones take turns.

        Args:
            key: The trace.
            num_requests: The number of its requests, each choice counted.
            in_flight: The number of unfinished requests by engine, those of placed traces included once they
                have been sent.
        """
        num_engines = len(self._num_requests)
        in_turn = [(self._next + one) % num_engines for one in range(num_engines)]
        # A request is in one of the counts before it is sent, and in both afterwards.
        rank = min(in_turn, key=lambda one: max(in_flight[one], self._num_requests[one]))
        self._next = (rank + 1) % num_engines
        self._num_requests[rank] += num_requests
        self._placed[key] = rank, num_requests

    def rank(self, key: str) -> int:
        """Return the engine of a placed trace."""
        return self._placed[key][0]

    def remove(self, key: str) -> None:
        """Remove a trace that has ended; idempotent."""
        rank, num_requests = self._placed.pop(key, (0, 0))
        self._num_requests[rank] -= num_requests


__all__ = ["TracePlacement"]
