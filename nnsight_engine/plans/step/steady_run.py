"""Runs of steps that reuse the plan of the step before, in the worker.

While the same requests decode in the same rows, and none of their operations depends on tokens or positions,
one plan serves step after step, and all is counted for all requests together: no Python work per request. A
run ends at a different batch, a failed request, or a limit that a request reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nnsight_engine.plans.step.ledger import ByteLedger
from nnsight_engine.plans.step.plan import StepPlan


class SteadyRun:
    """The steps that reuse one plan after the step it was built for; counts are since the last settlement.

    ``point_s`` are seconds per point at which a request's operations act.
    """

    def __init__(
        self,
        plan: StepPlan,
        request_ids: Sequence[str],
        positions: npt.NDArray[np.integer],
        ledger: ByteLedger,
    ) -> None:
        self.plan = plan
        self.num_steps = 0
        self.point_s = self.delivery_point_s = 0.0
        self._request_ids = list(request_ids)
        self._positions = positions.astype(np.int64)
        self._ledger = ledger
        self._num_points = self._kept = self._scratch = self._max_steps = 0

    def go_on(self, request_ids: Sequence[str], positions: npt.NDArray[np.integer]) -> bool:
        """Prepare the plan for the next step (one row per request), or return False if the run ends."""
        self._positions += 1
        # Scheduler and worker agree on the run's requests by this comparison alone; no request is inspected.
        if request_ids != self._request_ids or not np.array_equal(positions, self._positions):
            return False
        if not self.num_steps:
            self._begin()
        if self.num_steps >= self._max_steps or not self._ledger.reserve_all(self._kept + self._scratch):
            return False
        self.num_steps += 1
        self.plan.reset()
        return True

    def _begin(self) -> None:
        plan = self.plan
        self._num_points = sum(span.request.plan.num_points for span in plan.spans.values())
        self._kept = sum(reserved.kept for reserved in plan.reserved.values())
        self._scratch = sum(reserved.scratch for reserved in plan.reserved.values())
        self._max_steps = min(
            self._ledger.num_steps(request_id, reserved.kept, reserved.scratch)
            for request_id, reserved in plan.reserved.items()
        )

    def count_time(self) -> None:
        self.point_s += self.plan.take_time() / self._num_points

    def note_delivery(self, seconds: float) -> None:
        """Add the time that the delivery of a step's results took; may be called from another thread."""
        self.delivery_point_s += seconds / self._num_points

    def give_back(self) -> None:
        self._ledger.give_back_all(self._scratch)

    def settle(self, *, is_under_way: bool = False) -> None:
        """Attribute the run's counts to its requests, without the position of a step that is under way."""
        num_steps, done = self.num_steps, self.num_steps - is_under_way
        for request_id, span in self.plan.spans.items() if num_steps else ():
            request = span.request
            request.end_position += done
            request.charged_position += num_steps
            request.spent_s += (self.point_s + self.delivery_point_s) * request.plan.num_points
            span.start += num_steps
            self._ledger.assign(request_id, num_steps * self.plan.reserved[request_id].kept)
        self.num_steps, self.point_s, self.delivery_point_s = 0, 0.0, 0.0
