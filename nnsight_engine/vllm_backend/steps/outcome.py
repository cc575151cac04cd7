from __future__ import annotations

import dataclasses
import time
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from nnsight_engine.core.engine_counts import EngineCounts
from nnsight_engine.plans.records import StepResults
from nnsight_engine.plans.step.delivery import Delivery, SampledIds
from nnsight_engine.vllm_backend.compat import attach_results


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """Everything that a step with interventions leaves to be sent; made on the thread that runs steps."""

    delivery: Delivery | None
    reported: StepResults | None
    spent_s: float | None
    counts: EngineCounts

    def results(self, sampled: SampledIds, order: dict[str, int]) -> StepResults | None:
        """Return the step's results, None if there are none. Any thread may call this, once."""
        begin = time.monotonic()
        results = self.reported
        if self.delivery is not None:
            results = self.delivery.results(sampled, order)
            if self.reported is not None:
                results.add_reports(self.reported)
        if self.spent_s is not None:
            self.counts.note_time(self.spent_s + time.monotonic() - begin)
        return results


class InterventionOutput(AsyncModelRunnerOutput):
    """A runner's output, whose copy may be under way, with the results of the step's interventions."""

    def __init__(self, output: AsyncModelRunnerOutput, outcome: StepOutcome) -> None:
        self._output = output
        self._outcome = outcome

    def get_output(self) -> ModelRunnerOutput:
        return _with_results(self._output.get_output(), self._outcome)

    def get_kv_connector_output(self) -> Any:
        """Return what vLLM's output returns; vLLM calls this from 0.33 on."""
        return self._output.get_kv_connector_output()


def with_outcome(output: Any, outcome: StepOutcome) -> Any:
    if isinstance(output, AsyncModelRunnerOutput):
        return InterventionOutput(output, outcome)
    return output if output is None else _with_results(output, outcome)


def _with_results(output: ModelRunnerOutput, outcome: StepOutcome) -> ModelRunnerOutput:
    results = outcome.results(output.sampled_token_ids or [], output.req_id_to_index or {})
    attached: ModelRunnerOutput = output if results is None else attach_results(output, results)
    return attached
