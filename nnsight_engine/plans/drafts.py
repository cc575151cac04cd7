"""Which requests take part in speculative decoding.

The host plans a step before it knows how many drafts of the step before were accepted: it has an upper bound
on positions. That is enough for operations that treat all generated positions alike, or decide by token. Not
for those that name positions or parts of the answer, have conditions on earlier positions or stop, or capture
patterns or states of generated positions, of which a step has only one: these run without drafts.
"""

from __future__ import annotations

from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, RequestPlan
from nnsight_engine.plans.sites import SAMPLES
from nnsight_engine.plans.where import last_position, names_generated_alike


def takes_drafts(plan: RequestPlan) -> bool:
    return plan.answer is None and all(_is_free_of_positions(op, plan.prompt_len) for op in plan.ops)


def _is_free_of_positions(op: PlannedOp, prompt_len: int) -> bool:
    if op.when is not None and (op.when.has_slots or op.kind is OperationKind.STOP):
        return False
    if op.captures_patterns or op.captures_states:
        last = last_position(op.where, prompt_len)
        return last is not None and last < prompt_len
    if op.sites[0] == SAMPLES and (op.where.tokens is not None or op.where.exclude is not None):
        return False
    return names_generated_alike(op.where, prompt_len)
