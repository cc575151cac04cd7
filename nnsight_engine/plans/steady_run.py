"""Steps that go on with the plan of the step before, in the worker.

While the same requests decode in the same rows, and nothing of what they do depends on tokens or positions,
one plan serves step after step. Such steps are a run: positions, times and captured bytes are counted for all
its requests together, so that a step costs no Python for each of them, and become each one's own when the run
ends. Anything else ends it: another batch, a request that failed, a limit that somebody comes to.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nnsight_engine.plans.ledger import ByteLedger
from nnsight_engine.plans.step_plan import StepPlan


class SteadyRun:
    """Steps of one plan that follow the step it was made for.

    Args:
        plan: Steady, as its signature says.
        request_ids: The step's requests by row, those without interventions too.
        positions: Of their rows.
        ledger: Counts what is read.

    Attributes:
        plan: The plan.
        num_steps: How many steps followed and have not been settled, that which is under way included.
        point_s: Seconds that these took, for each point at which a request's operations act.
    """

    def __init__(
        self,
        plan: StepPlan,
        request_ids: list[str],
        positions: npt.NDArray[np.integer],
        ledger: ByteLedger,
    ) -> None:
        """Begin behind that step."""
        self.plan = plan
        self.num_steps = 0
        self.point_s = 0.0
        self._request_ids = list(request_ids)
        self._positions = positions.astype(np.int64)
        self._ledger = ledger
        self._num_points = self._kept = self._scratch = self._most_steps = 0

    def go_on(self, request_ids: list[str], positions: npt.NDArray[np.integer]) -> bool:
        """Make the plan that of the next step, or return False: then the run is over.

        Args:
            request_ids: Of the next step, in which each has one row.
            positions: Of their rows.
        """
        self._positions += 1
        # Scheduler and worker agree on who goes on by this alone: no request is looked at.
        if request_ids != self._request_ids or not np.array_equal(positions, self._positions):
            return False
        if not self.num_steps:
            self._begin()
        if self.num_steps >= self._most_steps or not self._ledger.reserve_all(self._kept + self._scratch):
            return False
        self.num_steps += 1
        self.plan.begin_again()
        return True

    def _begin(self) -> None:
        """Add up what one step takes, and how many steps everybody's own limit leaves room for."""
        plan = self.plan
        self._num_points = sum(span.request.plan.num_points for span in plan.spans.values())
        self._kept = sum(reserved.kept for reserved in plan.reserved.values())
        self._scratch = sum(reserved.scratch for reserved in plan.reserved.values())
        self._most_steps = min(
            self._ledger.num_steps(request_id, reserved.kept, reserved.scratch)
            for request_id, reserved in plan.reserved.items()
        )

    def count(self, seconds: float) -> None:
        """Count what the step's interventions took, and some seconds beside, as that of the run."""
        self.point_s += self.plan.take_time(seconds) / self._num_points

    def give_back(self) -> None:
        """Uncount what the step needed only while it ran."""
        self._ledger.give_back_all(self._scratch)

    def settle(self, *, is_under_way: bool = False) -> None:
        """Make what was counted for all each request's own, so that steps can be told one by one again.

        Args:
            is_under_way: Whether the last step is still to be told: nobody has come to its end yet.
        """
        num_steps, done = self.num_steps, self.num_steps - is_under_way
        for request_id, span in self.plan.spans.items() if num_steps else ():
            request = span.request
            request.end_position += done
            request.spent_s += self.point_s * request.plan.num_points
            span.start += num_steps
            self._ledger.assign(request_id, num_steps * self.plan.reserved[request_id].kept)
        self.num_steps, self.point_s = 0, 0.0
