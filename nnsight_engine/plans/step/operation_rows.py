"""The rows of a step on which each operation acts, and those of them that need logits."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nnsight_engine.plans.request_plan import LOGITS, OperationKind
from nnsight_engine.plans.step.active import ActiveOp
from nnsight_engine.plans.step.context import SiteKey, Stage, StepContext
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.instructions import Executor
from nnsight_engine.plans.step.plan import SiteWork, Span, StepPlan
from nnsight_engine.plans.step.table import Member, RowArray, TableBuilder
from nnsight_engine.plans.step.token_masks import RowParts, may_match, must_match
from nnsight_engine.plans.where import evaluate


@dataclasses.dataclass(slots=True)
class OperationRows:
    """The rows on which one operation acts in this step.

    Attributes:
        offsets: Offsets of the rows in the span, ascending.
        rows: The same rows as indices into the step's tensors; if states are captured, into its requests.
        mask: Which of the rows the operation's rule names, ``[rows]`` on the device; None for all.
        logits_rows: Those rows that need logits, as indices into the plan's ``logits_rows``.
        gate_stage: Stage of the evaluation of its condition at its first site.
        source_stage: Stage of the read of the values on which it depends, if that is elsewhere.
        gate: The gates of the step, from ``gate_start`` one for each of ``rows``; None without a condition.
    """

    span: Span
    active: ActiveOp
    offsets: RowArray
    stages: tuple[int, ...] = ()
    rows: RowArray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    mask: torch.Tensor | None = None
    logits_rows: RowArray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    logits_offsets: RowArray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    logits_mask: torch.Tensor | None = None
    gate_stage: int = 0
    source_stage: int = 0
    gate: torch.Tensor | None = None
    gate_start: int = 0

    @property
    def member(self) -> Member:
        return Member(self.span.request, self.active, not self.active.op.reads)

    def rows_at(self, key: SiteKey) -> RowArray:
        """Return row indices into the site's tensor; at ``logits`` they index the plan's ``logits_rows``."""
        return self.logits_rows if key == LOGITS else self.rows

    def offsets_at(self, key: SiteKey) -> RowArray:
        return self.logits_offsets if key == LOGITS else self.offsets

    def gate_at(self, key: SiteKey) -> tuple[torch.Tensor, RowArray] | None:
        """Return the gates of the step, and the place of each row's among them; None without a condition."""
        if self.gate is None:
            return None
        return self.gate, self.gate_start + np.searchsorted(self.offsets, self.offsets_at(key))

    def mask_at(self, key: SiteKey) -> torch.Tensor | None:
        return self.logits_mask if key == LOGITS else self.mask


class PlanInProgress:
    """A step while it is planned.

    Attributes:
        context: The model.
        plan: Its plan.
        table: Its instructions.
        staged: Its other work by site, with its order.
    """

    def __init__(self, context: StepContext, plan: StepPlan) -> None:
        self.context, self.plan = context, plan
        self.table = TableBuilder()
        self.staged: dict[SiteKey, list[tuple[float, SiteWork]]] = defaultdict(list)

    def on_device(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return to_device(values, self.context.device)

    def mask_of(self, items: Sequence[OperationRows]) -> int | None:
        """Return the index of the mask of all rows among the plan's masks; None if all are named."""
        masks = [item.mask for item in items if item.mask is not None]
        return self.plan.add_mask(torch.cat(masks)) if masks else None

    def finish(self, executor: Executor) -> None:
        """Put instructions and other work into the plan, in their order at each site.

        The plan holds the tensors that instructions point into, so that their memory stays valid.
        """
        context = self.context
        order_of_other_work = {
            key: sorted(order for order, _ in entries) for key, entries in self.staged.items()
        }
        segments = self.table.segments(order_of_other_work, executor, context.device, context.width)
        for key, segments_at_site in segments.items():
            self.staged[key] += segments_at_site
        for key, entries in self.staged.items():
            entries.sort(key=lambda entry: entry[0])
            self.plan.groups[key] = [site_work for _, site_work in entries]
        self.plan.held = self.table.held


def named_offsets(span: Span, active: ActiveOp, parts: RowParts | None) -> tuple[RowArray, bool]:
    """Return offsets of the rows on which the operation acts, and whether the device selects among them."""
    plan = span.request.plan
    # Positions delivered before a preemption are not delivered again.
    first = max(span.start, span.request.end_position) if active.op.reads else span.start
    if first >= span.stop:
        return np.empty(0, np.int64), False
    is_masked = False
    if active.constant is not None and first >= plan.prompt_len:
        is_named = np.full(span.stop - first, active.constant)
    else:
        positions = np.arange(first, span.stop, dtype=np.int64)
        token_ids = span.token_ids[first : span.stop].astype(np.int64)
        known, unknown = positions[: len(token_ids)], positions[len(token_ids) :]
        known_parts = None if parts is None else parts.known[first - span.start :]
        is_named = evaluate(active.op.where, known, token_ids, plan.prompt_len, known_parts)
        if len(unknown):
            may_be_named = may_match(active.op.where, unknown, plan.prompt_len)
            is_masked = bool((may_be_named & ~must_match(active.op.where, unknown, plan.prompt_len)).any())
            is_named = np.concatenate([is_named, may_be_named])
    offsets: RowArray = np.flatnonzero(is_named) + (first - span.start)
    # A `last` reduction keeps the last named row only. Of drafts, any may be the last that is accepted.
    is_open = bool(span.num_drafts) and not active.op.captures_patterns
    is_last = active.op.reduce == "last" and not (is_masked or is_open)
    return offsets[-1:] if is_last else offsets, is_masked


def number_logits_rows(plan: StepPlan, work: list[OperationRows]) -> None:
    """Determine which rows need logits: a write matters where a token is sampled or the request reads."""
    at_logits = [item for item in work if LOGITS in item.active.keys]
    if not at_logits:
        return
    needed: dict[str, list[RowArray]] = defaultdict(list)
    for item in at_logits:
        if item.active.op.reads:
            needed[item.span.request.request_id].append(item.rows)
        elif item.active.op.kind is OperationKind.MEAN and _has_whole_prompt(item.span):
            # A mean is taken over all named rows, including those where no token is sampled.
            needed[item.span.request.request_id].append(item.rows)
    for item in at_logits:
        stop = item.span.row + item.span.num_rows
        wanted = [np.arange(stop - 1 - item.span.num_drafts, stop, dtype=np.int64)]
        wanted += needed[item.span.request.request_id]
        kept = np.isin(item.rows, np.concatenate(wanted))
        item.logits_rows, item.logits_offsets = item.rows[kept], item.offsets[kept]
        if item.mask is not None:
            item.logits_mask = item.mask[to_device(np.flatnonzero(kept), item.mask.device)]
        plan.writes_logits |= not item.active.op.reads
    plan.logits_rows = np.unique(np.concatenate([item.logits_rows for item in at_logits]))
    for item in at_logits:
        item.logits_rows = np.searchsorted(plan.logits_rows, item.logits_rows).astype(np.int64)


def mean_rows(item: OperationRows, key: SiteKey) -> RowArray | None:
    """Return the rows over which a mean is taken at a site, or None if this step lacks some of them."""
    if not _has_whole_prompt(item.span):
        return None
    # The span begins at position 0, so offsets are positions.
    rows: RowArray = item.rows_at(key)[item.offsets_at(key) < item.span.request.plan.prompt_len]
    return rows


def _has_whole_prompt(span: Span) -> bool:
    return span.start == 0 and span.stop >= span.request.plan.prompt_len


def with_rows_alike(keys: Sequence[SiteKey], stage: Stage) -> list[tuple[list[int], list[SiteKey]]]:
    """Divide a pipeline stage's sites (their places among all, and keys): logits have other row numbers."""
    in_stage = [place for place, key in enumerate(keys) if stage.has(key)]
    at_logits = [place for place in in_stage if keys[place] == LOGITS]
    elsewhere = [place for place in in_stage if place not in at_logits] if at_logits else in_stage
    return [(places, [keys[place] for place in places]) for places in (at_logits, elsewhere) if places]
