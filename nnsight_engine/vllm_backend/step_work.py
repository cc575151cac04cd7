from __future__ import annotations

import itertools
from collections.abc import Iterable

from nnsight_engine.plans.request_plan import RequestPlan
from nnsight_engine.plans.work import MAX_WEIGHTS, WorkByPosition


class StepWork:
    """Bounds the work of operations in a step, but for one position; requests without any are the next."""

    def __init__(self) -> None:
        self.limit = 0.0
        self._of: dict[str, WorkByPosition] = {}
        self._used: dict[str, float] = {}
        self._weights = 0.0
        self._skipped: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    def add(self, request_id: str, plan: RequestPlan, prompt_ids: Iterable[int]) -> None:
        """Add a request; one without much work is ignored."""
        if plan.works:
            self._of[request_id] = WorkByPosition(plan, prompt_ids)

    def is_costly(self, request_id: str) -> bool:
        """Return whether a request's operations take longer than the model at some position."""
        return request_id in self._of and self._of[request_id].most > 1

    def discard(self, request_id: str) -> None:
        self._of.pop(request_id, None)
        self._skipped.discard(request_id)

    def begin(self, limit: float) -> None:
        self.limit = limit
        self._used.clear()
        self._weights = 0.0
        self._skipped.clear()

    def was_skipped(self, request_id: str) -> bool:
        return request_id in self._skipped

    def fit(self, request_id: str, start: int, num_tokens: int, *, is_whole: bool) -> int:
        """Return how many of a request's next positions this step computes, and count their work."""
        own = self._of.get(request_id)
        if own is None or not num_tokens:
            return num_tokens
        left = self.limit - self.used
        stop = start + num_tokens
        if self._used and self._weights + own.weights > MAX_WEIGHTS:
            stop = start
        elif not is_whole:
            stop = own.stop_within(start, stop, max(left, 0.0))
        elif self._used and own.between(start, stop) > left:
            stop = start
        if stop == start and not self._used:
            stop = start + 1
        if stop == start:
            self._skipped.add(request_id)
        else:
            self._used[request_id] = own.between(start, stop)
            self._weights += own.weights
        return stop - start

    def used_by(self, request_id: str) -> float:
        return self._used.get(request_id, 0.0)

    @property
    def used(self) -> float:
        return sum(self._used.values())

    @property
    def has_costly(self) -> bool:
        return any(map(self.is_costly, self._used))

    def without_room(self, chunks: Iterable[tuple[str, int, int]], waiting: Iterable[str]) -> set[str]:
        """Return the waiting requests with much work without room beside the running ``chunks``."""
        own = [(self._of[name], start, stop) for name, start, stop in chunks if name in self._of]
        works = (one.between(start, stop) for one, start, stop in own)
        is_full = any(total >= self.limit for total in itertools.accumulate(works))
        weights = sum(one.weights for one, _, _ in own)
        return {
            name
            for name in waiting
            if name in self._of and (is_full or weights + self._of[name].weights > MAX_WEIGHTS)
        }
