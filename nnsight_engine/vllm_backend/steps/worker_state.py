"""State of the declarative interventions of one worker: live requests, the step's plan, the model's points.

The methods follow a step. An error of a request is stored with it and never raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tensors import DTYPES
from nnsight_engine.plans.records import Failure
from nnsight_engine.plans.request_plan import LOGITS, PlannedSite
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.banks import FailsAnywhere, is_failure
from nnsight_engine.plans.step.builder import StepBuilder
from nnsight_engine.plans.step.context import ByteLedger, StepContext
from nnsight_engine.plans.step.delivery import (
    Delivery,
    RefusedDelivery,
    StepCollection,
    step_delivery,
    streak_delivery,
)
from nnsight_engine.plans.step.graph_table import GraphTable, instructions_per_row
from nnsight_engine.plans.step.host_arena import HostArena, HostCopy
from nnsight_engine.plans.step.plan import LogitsRows, Span, StepPlan, Streak
from nnsight_engine.plans.step.registrar import Registrar
from nnsight_engine.plans.step.stage_results import (
    StageResults,
    add_results,
    results_of_stage,
    with_silent_stages,
)
from nnsight_engine.vllm_backend.hooks import attention_form, hooked_encoder
from nnsight_engine.vllm_backend.model_points import ModelPoints


@dataclasses.dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows of one request; ``index`` is its row of values with one row per request.

    With asynchronous steps, ``start`` is an upper bound for requests that take drafts, which are the last
    rows.
    """

    request_id: str
    index: int
    row: int
    num_rows: int
    start: int
    num_drafts: int = 0


@dataclasses.dataclass(eq=False)
class Step:
    """The rows of one step; ``token_ids`` is ``[padded rows]`` on the device.

    Attributes:
        known_ids: The ids of each request's tokens by absolute position, as far as the host knows them.
        prefill_lens: Number of given tokens: of the prompt, and those generated before a preemption.
        is_repeatable: Whether the model can be run on the same inputs again.
        num_drafts: Drafted tokens, which are the last rows of each request; None if there are none.
    """

    request_ids: Sequence[str]
    starts: npt.NDArray[np.integer]
    row_counts: npt.NDArray[np.integer]
    _: dataclasses.KW_ONLY
    num_padded_rows: int
    token_ids: torch.Tensor
    known_ids: Mapping[str, npt.NDArray[np.int32]]
    prefill_lens: npt.NDArray[np.integer]
    is_repeatable: bool
    num_drafts: npt.NDArray[np.integer] | None = None
    num_rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = int(self.row_counts.sum())

    def is_sampled(self, rows: RequestRows) -> bool:
        """Return whether a token of the request is sampled: its prompt ends in this step or has ended."""
        return rows.start + rows.num_rows >= int(self.prefill_lens[rows.index])

    @property
    def has_one_row_each(self) -> bool:
        """Whether each request has one row: it decodes, or computes its prompt's last token."""
        return self.num_rows == len(self.request_ids)

    def rows(self) -> Iterator[RequestRows]:
        """Iterate over the requests of the step, in order, with their rows."""
        row = 0
        drafts = [0] * len(self.request_ids) if self.num_drafts is None else self.num_drafts.tolist()
        for index, (request_id, count, start, num_drafts) in enumerate(
            zip(self.request_ids, self.row_counts.tolist(), self.starts.tolist(), drafts, strict=True)
        ):
            yield RequestRows(request_id, index, row, count, start, num_drafts)
            row += count

    def logits_rows(self) -> npt.NDArray[np.int64]:
        """Return the rows with logits: each request's last row, and the one before each of its drafts."""
        if self.has_one_row_each:
            return np.arange(self.num_rows, dtype=np.int64)
        ends = np.cumsum(self.row_counts, dtype=np.int64) - 1
        if self.num_drafts is None:
            return ends
        counts = self.num_drafts.astype(np.int64) + 1
        num_before = np.cumsum(counts) - counts
        # The first of each request's rows, less its place in the result, which is then added.
        return np.repeat(ends + 1 - counts - num_before, counts) + np.arange(counts.sum())

    def logits_ends(self) -> npt.NDArray[np.int64]:
        """Return each request's last row among the rows with logits."""
        if self.num_drafts is None:
            return np.arange(len(self.request_ids), dtype=np.int64)
        return np.cumsum(self.num_drafts + 1, dtype=np.int64) - 1


logger = logging.getLogger(__name__)

NORM = PlannedSite("norm.output")


class WorkerState:
    """The operations of one worker's requests; ``fails_anywhere`` returns whether any rank has failed."""

    def __init__(
        self,
        points: ModelPoints,
        spec: ModelSpec,
        device: torch.device,
        *,
        max_request_bytes: int,
        max_engine_bytes: int,
        is_asynchronous: bool = False,
        fails_anywhere: FailsAnywhere = is_failure,
    ) -> None:
        self.points = points
        self.spec = spec
        self._ledger = ByteLedger(max_request_bytes=max_request_bytes, max_engine_bytes=max_engine_bytes)
        context = StepContext(
            spec,
            DTYPES[spec.dtype],
            device,
            self._ledger,
            form_of=functools.cache(lambda layer: attention_form(points.attention(layer))),
            is_asynchronous=is_asynchronous,
            stage=points.stage,
            fails_anywhere=fails_anywhere,
        )
        self._registrar = Registrar(context)
        self._builder = StepBuilder(context)
        # On a CPU the values are on the host already, but the next step overwrites them. The last stage of a
        # pipeline collects those of all stages.
        is_copied = points.stage.is_last and (is_asynchronous or device.type != "cpu")
        self._collection = StepCollection(points.lens_logits, HostArena(device) if is_copied else None)
        self._active: dict[str, ActiveRequest] = {}
        self._refused: dict[str, Failure] = {}
        self._streak: Streak | None = None
        self._is_next = False  # whether the last step belonged to the streak
        self._encoded: list[StepPlan] = []  # of operations on images, before the step

    def begin_step(
        self,
        arrived: Sequence[tuple[str, dict[str, Any]]],
        finished: set[str],
        returned: Mapping[str, int] | None = None,
    ) -> None:
        """Register and release requests; ``returned`` has the number of tokens of preempted ones."""
        # The steps of a streak are consecutive: a step without interventions ends it.
        if not self._is_next:
            self._end_streak()
        self._is_next = False
        self._encoded.clear()
        if self._active or self._refused:
            for request_id in finished:
                self._forget(request_id)
        for request_id, num_tokens in (returned or {}).items():
            self._return(request_id, num_tokens)
        for request_id, entry in arrived:
            if request_id in self._active:
                continue
            try:
                self._active[request_id] = self._registrar.register(
                    request_id, entry["plan"], entry["tensors"]
                )
            except InterventionError as error:
                self._refused[request_id] = Failure(error.code, error.message)
            except Exception as error:
                logger.exception("a plan could not be registered")
                self._refused[request_id] = Failure("intervention_failed", f"the plan is unusable: {error}")

    def _return(self, request_id: str, num_tokens: int) -> None:
        """Record how far a request with drafts had come: all its tokens but the last were computed."""
        request = self._active.get(request_id)
        if request is not None and request.has_drafts:
            self._end_streak()
            request.end_position = num_tokens - 1

    def _forget(self, request_id: str) -> None:
        """Release what a finished request holds."""
        self._refused.pop(request_id, None)
        request = self._active.pop(request_id, None)
        if request is not None:
            self._end_streak()
            self._registrar.forget(request)
            self._ledger.release(request_id)
            self._builder.forget()

    def _end_streak(self) -> None:
        streak, self._streak = self._streak, None
        if streak is not None:
            streak.settle()

    def num_live(self) -> dict[str, int]:
        """Return the number of resources held, for tests and metrics; all zero when no request is live."""
        return {
            "requests": len(self._active) + len(self._refused),
            "vectors": len(self._registrar.bank),
            "dictionaries": self._registrar.dictionaries.num_used,
            "captured_bytes": self._ledger.total_bytes,
        }

    @property
    def live(self) -> Collection[str]:
        return self._active.keys()

    def instructions_per_row(self, request_id: str, taps: Collection[int], *, has_drafts: bool) -> int | None:
        request = self._active.get(request_id)
        return 0 if request is None else instructions_per_row(request, taps, has_drafts=has_drafts)

    def graph_table(self, taps: Collection[int], num_taps: int, num_rows: int) -> GraphTable:
        return self._builder.graph_table(taps, num_taps, num_rows)

    @property
    def idle(self) -> bool:
        return not self._active

    def enters_encoder(self, request_id: str) -> bool:
        request = self._active.get(request_id)
        return request is not None and bool(request.plan.images)

    @contextlib.contextmanager
    def encoding(self, request_id: str, image: int) -> Iterator[None]:
        """Run a request's operations on one image; what they read leaves with the step that follows."""
        request = self._active[request_id]
        try:
            plan = self._builder.plan_image(request, image)
        except Exception as error:
            logger.exception("the operations on an image could not be planned")
            request.fail(
                "intervention_failed", f"its operations on image {image} could not be planned: {error}"
            )
            yield
            return
        with hooked_encoder(self.points, plan, request.plan.images[image].num_rows):
            yield
        plan.fail_unreached()
        self._encoded.append(plan)

    def plan(self, step: Step) -> StepPlan | None:
        """Return the step's plan, with what operations on images have read; None if none takes part."""
        plan = self._planned(step)
        if plan is not None:
            for earlier in self._encoded:
                plan.take_over(earlier)
            self._encoded.clear()
        return plan

    def _planned(self, step: Step) -> StepPlan | None:
        """Return the last step's plan if its streak goes on, else a new one, which may begin a streak.

        A streak is of consecutive steps with the same requests, one row each, which can use one plan.
        """
        # A streak has one row per request, so its rows need no counting.
        if not step.has_one_row_each:
            self._end_streak()
            return self._plan(step)
        plan = self._next_of_streak(step)
        if plan is not None:
            return plan
        self._end_streak()
        plan = self._plan(step)
        if plan is not None and plan.signature is not None:
            self._streak = Streak(plan, step.request_ids, step.starts, self._ledger)
            self._is_next = True
        return plan

    def _next_of_streak(self, step: Step) -> StepPlan | None:
        """Return the last step's plan if it also serves this step, else None."""
        streak = self._streak
        if streak is None or self._registrar.failed or not streak.advance(step.request_ids, step.starts):
            return None
        self._is_next = True
        return streak.plan

    def _plan(self, step: Step) -> StepPlan | None:
        """Plan a step anew; None if no operation takes part. Requests that cannot be planned fail."""
        spans = [
            Span(
                request,
                rows.row,
                rows.num_rows,
                rows.start,
                step.known_ids[rows.request_id],
                step.token_ids,
                rows.num_drafts,
                rows.index,
            )
            for rows in step.rows()
            if (request := self._active.get(rows.request_id)) is not None
        ]
        if not spans:
            return None
        try:
            return self._builder.plan(spans)
        except Exception:
            # Plan the requests one by one: those that cannot be planned alone fail, the others do not.
            logger.exception("a step could not be planned")
            for span in spans:
                self._try(span)
            self._builder.forget()
        try:
            return self._builder.plan(spans)
        except Exception as error:
            # Each can be planned alone, but not all together. No single request is at fault, so all fail.
            logger.exception("a step could not be planned for all of its requests")
            self._builder.forget()
            for span in spans:
                span.request.fail("intervention_failed", f"the step could not be planned: {error}")
            return self._builder.plan(spans)

    def _try(self, span: Span) -> None:
        """Plan one request alone; if that is not possible, it fails."""
        try:
            self._builder.give_back(self._builder.plan([span]), kept=True)
        except Exception as error:
            logger.exception("a request could not be planned")
            span.request.fail("intervention_failed", f"its operations could not be planned: {error}")

    def results_of_stage(self, plan: StepPlan) -> StageResults:
        results = results_of_stage(plan, self.points.stage, self.spec)
        results.failures |= self._refused
        return results

    def add_results(self, plan: StepPlan, of_stages: Sequence[StageResults]) -> None:
        """Add the results of earlier pipeline stages to the plan of the last one."""
        try:
            for results in with_silent_stages(of_stages, self.points.stage):
                add_results(plan, results, self.spec)
        except Exception as error:
            logger.exception("the results of earlier stages could not be used")
            for span in plan.spans.values():
                span.request.fail("intervention_failed", f"results of a stage could not be used: {error}")

    def on_hidden(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        plan.run(NORM, hidden, None)

    def on_logits(
        self,
        plan: StepPlan,
        hidden: torch.Tensor,
        sampled: torch.Tensor,
        sample_rows: npt.NDArray[np.int64],
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Run the operations at the logits.

        Args:
            hidden: Output of the final norm, ``[tokens, hidden]``.
            sampled: Logits from which tokens are about to be sampled, ``[rows, vocabulary]``.
            sample_rows: For each row of ``sampled``, the row of ``hidden`` it was computed from; ascending.
        """
        rows = plan.logits_rows
        if not len(rows):
            return
        with plan.containing(LOGITS):
            origin = plan.logits_from
            if origin is None or not origin.holds(sample_rows):
                origin = plan.logits_from = LogitsRows.of(rows, sample_rows, sampled.device)
            logits = origin.gather(sampled, hidden, compute_logits)
            plan.run(LOGITS, logits, None)
            if plan.writes_logits:
                origin.put_back(logits, sampled)

    def collect(self, plan: StepPlan) -> None:
        """Start copying the step's reads to the host, before sampling waits for the device."""
        try:
            self._collection.collect(plan)
        except Exception as error:
            logger.exception("what a step has read could not be collected")
            for span in plan.spans.values():
                span.request.fail("intervention_failed", f"results could not be collected: {error}")
            plan.reads, plan.patterns, plan.samples, plan.masks = [], [], [], []
            plan.overflows, plan.overflows_before = [], []
            plan.copy = HostCopy([])
            self._builder.forget()

    def leave(self, plan: StepPlan | None) -> Delivery | None:
        """End the step; return what delivers its results once they are on the host, or None."""
        delivery: Delivery | None = None
        if plan is not None:
            plan.fail_unreached()
            delivery = self._leave_streak(plan) or step_delivery(plan)
        if not self._refused:
            return delivery
        return RefusedDelivery(delivery, dict(self._refused))

    def _leave_streak(self, plan: StepPlan) -> Delivery | None:
        """Return the delivery of a streak's step, or None if it must be reported request by request."""
        streak = self._streak
        if streak is None or not streak.num_steps:
            self._builder.give_back(plan)
            return None
        streak.give_back()
        if self._registrar.failed or plan.is_unreported:
            streak.settle(is_under_way=True)
            return None
        return streak_delivery(streak)
