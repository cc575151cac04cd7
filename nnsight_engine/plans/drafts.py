"""Which requests take part in speculative decoding.

The host plans a step before it knows how many drafts of the step before were accepted, so it knows no more
than an upper bound on the positions of a request's rows. That is enough for operations that treat all
generated positions alike, or decide by token. Other requests run without drafts, and have the same results:
those that name positions, or parts of the answer, which depend on all tokens before, those with conditions
that depend on earlier positions or stop, and those that capture attention patterns or states of generated
positions, of which a step has only one.
"""

from __future__ import annotations

from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, RequestPlan
from nnsight_engine.plans.sites import SAMPLES
from nnsight_engine.plans.where import last_position, names_generated_alike


def takes_drafts(plan: RequestPlan) -> bool:
    """Return whether drafts may be proposed for a request."""
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
