"""The work of a request's operations, as a multiple of the model's own forward pass.

It bounds a step in positions. It is an estimate, in multiply-adds: of products with large matrices, and of
passes over vocabularies, dictionaries and activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from nnsight_engine.core.detector import Form
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.request_plan import (
    LOGITS,
    OperationKind,
    PlannedFeatures,
    PlannedOp,
    PlannedScore,
    RequestPlan,
    TensorData,
    WhereRule,
)
from nnsight_engine.plans.where import Mask, by_position, evaluate, generated_is_constant

_LENS: Final = 128
_TARGET: Final = 24
_SORT: Final = 96
"""Multiply-adds in the time that a lens, a target of it, and a choice of features take for each number."""
_PASS: Final = 100
"""Multiply-adds in the time in which an operation reads or writes a number of an activation."""
MAX_WEIGHTS: Final = 8.0
"""Most weights that operations read in one step, as a multiple of the model's own.

A step of few positions takes about as long as the weights take to read.
"""
_LEAST: Final = 1 / 8
"""Requests with less work than this at a position are left out: most have far less."""


def works_of(
    ops: Sequence[PlannedOp], tensors: dict[str, TensorData], spec: ModelSpec, num_positions: int
) -> dict[int, float]:
    """Return by index the work of operations at each position on which they act; empty if it is little."""
    widths = {leaf.name: leaf.width for leaf in spec.leaves}
    totals = {}
    for index, op in enumerate(ops):
        passes = _PASS * sum(widths.get(site.leaf, 0) for site in op.sites)
        totals[index] = passes + _products(op, tensors, spec, num_positions)
    if sum(totals.values()) < _LEAST * spec.forward_work:
        return {}
    return {index: total / spec.forward_work for index, total in totals.items() if total}


def _products(op: PlannedOp, tensors: dict[str, TensorData], spec: ModelSpec, num_positions: int) -> int:
    """Return the multiply-adds of an operation at one position, apart from reading and writing values."""
    num_sites = len(op.sites)
    # The model itself computes logits at the last position of a prompt only.
    total = spec.hidden_size * spec.vocab_size if LOGITS in op.sites else 0
    match op.kind:
        case OperationKind.LENS:
            per_position = spec.hidden_size + _LENS + _TARGET * len(op.targets)
            total += num_sites * spec.vocab_size * per_position
        case OperationKind.FEATURES | OperationKind.FEATURE if op.features is not None:
            total += _features(op.features)
        case OperationKind.SUBSPACE:
            total += num_sites * 2 * tensors[op.tensor].shape[-2] * tensors[op.tensor].shape[-1]
        case OperationKind.CAPTURE if op.captures_patterns:
            queries = (spec.leaf("attn.q", site.layer) for site in op.sites)
            total += num_positions * sum(leaf.width for leaf in queries if leaf is not None)
        case _:
            pass
    if op.score is not None:
        total += _score(op.score, tensors)
    if op.when is not None:
        total += sum(_score(test.score, tensors) for test in op.when.tests)
    return total


def weights_of(ops: Iterable[PlannedOp], tensors: dict[str, TensorData], spec: ModelSpec) -> float:
    """Return how many weights of dictionaries and detectors a step reads, divided by those of the model."""
    total = 0
    for op in ops:
        tests = () if op.when is None else (test.score for test in op.when.tests)
        total += sum(_score(score, tensors, sort=0) for score in (op.score, *tests) if score is not None)
        total += 0 if op.features is None else _features(op.features, sort=0)
    return total / spec.forward_work


def _features(features: PlannedFeatures, *, sort: int = _SORT) -> int:
    """Return the multiply-adds of features at one position; ``sort`` counts for each one that is compared."""
    config = features.dictionary.config
    num_sorts = (config.k is not None) + (features.top_k > 0)
    num_read = config.num_features if num_sorts else len(features.ids)
    return num_read * (config.input_width + num_sorts * sort) + len(features.gains) * config.output_width


def _score(score: PlannedScore, tensors: dict[str, TensorData], *, sort: int = _SORT) -> int:
    """Return the multiply-adds of a score at one position; those of linear parts are too few to count."""
    total = 0
    for part in score.parts:
        if part.features is not None:
            total += _features(part.features, sort=sort)
        elif part.form is Form.MLP:
            total += sum(len(tensors[key].data) // 4 for _, key in part.tensors)
    return total


class WorkByPosition:
    """The work at each position; rules that depend on the answer's tokens or parts count as matching."""

    def __init__(self, plan: RequestPlan, prompt_ids: Iterable[int]) -> None:
        self.weights = plan.weights
        ids = np.fromiter(prompt_ids, np.int64)
        positions = np.arange(len(ids), dtype=np.int64)
        self.prompt: npt.NDArray[np.float64] = np.zeros(len(ids))
        self.generated = 0.0
        for index, work in plan.works.items():
            op = plan.ops[index]
            if op.is_in_encoder:
                continue
            # The scores of a test over earlier positions are computed at each of them.
            is_everywhere = op.when is not None and op.when.has_history
            rule = WhereRule() if is_everywhere else op.where
            self.prompt[_matching(rule, positions, ids, plan.prompt_len)] += work
            if generated_is_constant(rule, plan.prompt_len, plan.prompt_len) is not False:
                self.generated += work
        self._sums = np.concatenate([[0.0], np.cumsum(self.prompt)])
        self.most = max(float(self.prompt.max(initial=0.0)), self.generated)

    def between(self, start: int, stop: int) -> float:
        """Return the work of the positions from ``start`` up to ``stop``."""
        length = len(self.prompt)
        in_prompt = self._sums[min(stop, length)] - self._sums[min(start, length)]
        return float(in_prompt) + self.generated * (max(stop, length) - max(start, length))

    def stop_within(self, start: int, stop: int, limit: float) -> int:
        """Return the largest position up to ``stop`` such that the work from ``start`` on is in the limit."""
        length = len(self.prompt)
        if start < length:
            position = int(np.searchsorted(self._sums, self._sums[start] + limit, side="right")) - 1
            if position < min(stop, length):
                return max(position, start)
        if not self.generated or self.between(start, stop) <= limit:
            return stop
        first = max(start, length)
        return first + max(0, int((limit - self.between(start, first)) / self.generated))


def _matching(
    rule: WhereRule, positions: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], prompt_len: int
) -> Mask:
    """Return which prompt positions count; if a rule names a part of the answer, all it may match."""
    if rule.names_part:
        return by_position(rule, positions, prompt_len)
    return evaluate(rule, positions, ids, prompt_len)
