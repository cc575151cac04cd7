"""Which positions a where rule matches; the only module that gives a ``WhereRule`` its meaning.

Conditions on the position alone are separate from those on the token, because decode steps may reuse a plan
only if no token can change the result.

It also decides which requests take part in speculative decoding. The host plans a step before it knows how
many drafts of the step before were accepted: it has an upper bound on positions. That is enough for
operations that treat all generated positions alike, or decide by token. Not for those that name positions or
parts of the answer, have conditions on earlier positions or stop, or capture patterns or states of generated
positions, of which a step has only one: these run without drafts.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from nnsight_engine.plans.request_plan import SAMPLES, OperationKind, Parts, PlannedOp, RequestPlan, WhereRule

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def evaluate(
    rule: WhereRule,
    positions: Positions,
    token_ids: npt.NDArray[np.integer],
    prompt_len: int,
    parts: Parts | None = None,
) -> Mask:
    """Return which positions the rule matches, ``[n]``; ``positions`` are absolute, in any order."""
    mask = by_position(rule, positions, prompt_len)
    if rule.tokens is not None:
        mask &= np.isin(token_ids, np.asarray(rule.tokens, np.int64))
    if rule.part:
        if parts is None:
            raise ValueError("the rule names a part of the answer, and the parts are not given")
        mask &= parts == rule.part
    if rule.exclude is not None:
        mask &= ~evaluate(rule.exclude, positions, token_ids, prompt_len, parts)
    return mask


def generated_is_constant(rule: WhereRule, prompt_len: int, from_position: int) -> bool | None:
    """Return whether the rule matches generated positions from ``from_position`` on; None if it varies."""
    named = _clause_is_constant(rule, prompt_len, from_position)
    if rule.exclude is None or named is False:
        return named
    excluded = generated_is_constant(rule.exclude, prompt_len, from_position)
    if excluded is True:
        return False
    return named if excluded is False else None


def names_generated_alike(rule: WhereRule, prompt_len: int) -> bool:
    """Return whether no generated position differs from another, apart from its token."""
    by_token = msgspec.structs.replace(rule, tokens=None, exclude=None)
    if _clause_is_constant(by_token, prompt_len, prompt_len) is None:
        return False
    return rule.exclude is None or names_generated_alike(rule.exclude, prompt_len)


def may_generate(rule: WhereRule, prompt_len: int, num_positions: int) -> bool:
    """Return whether the rule may match a generated position, with suitable tokens."""
    if rule.phase == "prompt":
        return False
    start = max(rule.start, prompt_len)
    stop = num_positions if rule.stop is None else min(rule.stop, num_positions)
    if rule.positions is None:
        candidates = np.arange(start, max(start, stop), dtype=np.int64)
    else:
        candidates = np.asarray([p for p in rule.positions if start <= p < stop], np.int64)
    exclude = rule.exclude
    if exclude is not None and _excludes_all(rule, exclude):
        candidates = candidates[~by_position(exclude, candidates, prompt_len)]
    return len(candidates) > 0


def last_position(rule: WhereRule, prompt_len: int) -> int | None:
    """Return an upper bound on the positions that the rule matches; None without one, -1 for no match."""
    bounds: list[int] = []
    if rule.phase == "prompt":
        bounds.append(prompt_len - 1)
    if rule.stop is not None:
        bounds.append(rule.stop - 1)
    if rule.positions is not None:
        bounds.append(max(rule.positions, default=-1))
    return min(bounds, default=None)


def _excludes_all(rule: WhereRule, exclude: WhereRule) -> bool:
    """Return whether ``exclude`` takes out all that the rule matches at a position, whatever its token."""
    if exclude.part not in {0, rule.part}:
        return False
    if exclude.tokens is None:
        return True
    return rule.tokens is not None and set(rule.tokens) <= set(exclude.tokens)


def by_position(rule: WhereRule, positions: Positions, prompt_len: int) -> Mask:
    """Apply phase, range and positions; ignore tokens, ``exclude`` and parts of the answer."""
    if rule.phase == "prompt":
        mask = positions < prompt_len
    elif rule.phase == "generated":
        mask = positions >= prompt_len
    else:
        mask = np.ones(len(positions), np.bool_)
    if rule.start > 0:
        mask &= positions >= rule.start
    if rule.stop is not None:
        mask &= positions < rule.stop
    if rule.positions is not None:
        mask &= np.isin(positions, np.asarray(rule.positions, np.int64))
    if rule.part:
        mask &= positions >= prompt_len - 1
    return mask


def _clause_is_constant(rule: WhereRule, prompt_len: int, from_position: int) -> bool | None:
    """Return the same as ``generated_is_constant``, for a rule without its ``exclude``."""
    first = max(prompt_len, from_position)
    last_listed = None if rule.positions is None else max(rule.positions, default=-1)
    if (
        rule.phase == "prompt"
        or (rule.stop is not None and rule.stop <= max(first, rule.start))
        or (last_listed is not None and last_listed < max(first, rule.start))
    ):
        return False
    varies = (
        rule.start > first
        or rule.stop is not None
        or rule.positions is not None
        or rule.tokens is not None
        or rule.part
    )
    return None if varies else True


def takes_drafts(plan: RequestPlan) -> bool:
    """Return whether a request takes part in speculative decoding."""
    return plan.answer is None and all(_is_free_of_positions(op, plan.prompt_len) for op in plan.ops)


def _is_free_of_positions(op: PlannedOp, prompt_len: int) -> bool:
    """Return whether an operation allows drafts, with which positions are not known exactly."""
    if op.when is not None and (op.when.has_slots or op.kind is OperationKind.STOP):
        return False
    if op.captures_patterns or op.captures_states:
        last = last_position(op.where, prompt_len)
        return last is not None and last < prompt_len
    if op.sites[0] == SAMPLES and (op.where.tokens is not None or op.where.exclude is not None):
        return False
    return names_generated_alike(op.where, prompt_len)
