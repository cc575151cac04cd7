"""Reassembles the payloads of one choice in the API process, where they arrive in order.

``take_part`` returns the results of the tokens delivered so far, so that a stream sends each token's results
with that token even when the engine is ahead of the reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.core.dtypes import ITEM_BYTES, LARGEST, WIDER
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tensors import DTYPES, tensor_to_bytes
from nnsight_engine.plans.collect.results import (
    CollectedCapture,
    CollectedFeatures,
    CollectedLens,
    CollectedMarks,
    CollectedProbe,
    CollectedResults,
    CollectedScores,
    CollectedSites,
    LensRows,
    TensorResult,
)
from nnsight_engine.plans.records import (
    Failure,
    Payload,
    StepInfo,
    StepRecord,
    leaf_width,
    may_overflow,
    width_classes,
)
from nnsight_engine.plans.request_plan import SAMPLES, OperationKind, PlannedOp, PlannedSite, RequestPlan
from nnsight_engine.plans.where import Positions, evaluate

_ITEM_DTYPES: dict[str, type[np.generic]] = {
    "float32": np.uint32,
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "int64": np.uint64,
}
"""Unsigned integer type of each dtype's size: values are moved with it, never computed with."""

Values = npt.NDArray[np.generic]
_Item = TypeVar("_Item", bound=np.generic)
OperationResult = (
    CollectedCapture | CollectedProbe | CollectedLens | CollectedScores | CollectedFeatures | CollectedMarks
)


def assemble(plan: RequestPlan, spec: ModelSpec, records: Sequence[StepRecord]) -> list[OperationResult]:
    """Return the results of operations, in the order of the plan; raise ``not_finite`` beyond a dtype.

    The records of one operation are in the order of their positions.
    """
    by_op: dict[int, list[StepRecord]] = defaultdict(list)
    for record in records:
        by_op[record.op].append(record)
    return [_result(plan.ops[index], spec, by_op[index]) for index in sorted(by_op)]


def _result(op: PlannedOp, spec: ModelSpec, records: list[StepRecord]) -> OperationResult:
    positions = [position for record in records for position in record.positions]
    match op.kind:
        case OperationKind.PROBE:
            values = _join(records, 0, (len(op.sites),), np.float32)
            points = {str(site): values[:, i] for i, site in enumerate(op.sites)}
            return CollectedProbe(op.name, positions, points)
        case OperationKind.LENS:
            return CollectedLens(op.name, positions, _lens_layers(op, records))
        case OperationKind.DETECT:
            return CollectedScores(op.name, positions, _join(records, 0, (), np.float32))
        case OperationKind.FEATURES:
            return _features(op, positions, records)
        case OperationKind.STOP | OperationKind.FLAG:
            return CollectedMarks(op.name, op.kind, gated_positions(records))
        case _:
            return CollectedCapture(op.name, positions, op.reduce, _captured(op, spec, records))


def gated_positions(records: Sequence[StepRecord]) -> list[int]:
    """Return the positions at which a condition held: a gate's records have one part, a byte per position."""
    return [
        position
        for record in records
        for position, holds in zip(record.positions, record.parts[0], strict=True)
        if holds
    ]


def _captured(op: PlannedOp, spec: ModelSpec, records: list[StepRecord]) -> dict[str, TensorResult]:
    """Return a capture's tensor at each point; each width has a part of the records, with all its sites."""
    dtype = op.dtype or spec.dtype
    if op.sites[0] == SAMPLES:
        dtype = "int64"
    if op.captures_patterns:
        num_heads = leaf_width(op.sites[0], spec)
        return captured_patterns(op, records, num_heads=num_heads, dtype=dtype)
    if may_overflow(op, spec):
        _check_overflows(op, records)
    points: dict[int, TensorResult] = {}
    # A reduction over no positions has no rows, like an unreduced capture without positions.
    has_rows = op.reduce == "none" or not records[-1].positions
    for part, indices in enumerate(width_classes(op, spec)):
        width = leaf_width(op.sites[indices[0]], spec)
        if has_rows:
            values = _join(records, part, (len(indices), width), _ITEM_DTYPES[dtype])
            # Copied once here: NumPy's `tobytes` on a non-contiguous array is slow (item by item).
            values = np.ascontiguousarray(values.swapaxes(0, 1))
        elif op.reduce == "mean":
            (record,) = records
            total = np.frombuffer(record.parts[part], np.float32).reshape(len(indices), width)
            mean = total / np.float32(len(record.positions))
            _check_mean(op, mean, [op.sites[index] for index in indices], dtype)
            values = _cast(mean, dtype)
        else:
            item = np.dtype(_ITEM_DTYPES[dtype])
            values = np.frombuffer(records[-1].parts[part], item).reshape(len(indices), width)
        for place, index in enumerate(indices):
            leaf = spec.leaf(op.sites[index].leaf, op.sites[index].layer)
            shape = () if leaf is None else leaf.shape
            rows = values[place].shape[:-1] if has_rows else ()
            points[index] = TensorResult(dtype, (*rows, *shape), values[place].tobytes())
    return {str(op.sites[index]): points[index] for index in sorted(points)}


def _join(
    records: list[StepRecord], part: int, row_shape: tuple[int, ...], dtype: type[_Item]
) -> npt.NDArray[_Item]:
    """Return a part of the records as one array, ``[positions, *row_shape]``."""
    pieces = [
        np.frombuffer(record.parts[part], dtype).reshape(len(record.positions), *row_shape)
        for record in records
    ]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _cast(values: npt.NDArray[np.float32], dtype: str) -> Values:
    """Return float32 values rounded to ``dtype``, as unsigned integers of its size."""
    rounded = torch.from_numpy(values).to(DTYPES[dtype])
    return np.frombuffer(tensor_to_bytes(rounded), _ITEM_DTYPES[dtype]).reshape(values.shape)


def _check_overflows(op: PlannedOp, records: list[StepRecord]) -> None:
    """Raise ``not_finite`` for numbers beyond the dtype: the last part of each record flags such rows."""
    for record in records:
        rows = np.frombuffer(record.parts[-1], np.bool_).reshape(-1, len(op.sites))
        if rows.any():
            row, site = np.argwhere(rows)[0]
            # A reduction has only its last row left.
            position = record.positions[row] if op.reduce == "none" else record.positions[-1]
            raise _beyond(op.dtype, f"`{op.name}` captures {op.sites[site]} at position {position}, where a")


def _check_mean(
    op: PlannedOp, mean: npt.NDArray[np.float32], sites: Sequence[PlannedSite], dtype: str
) -> None:
    """Raise ``not_finite`` for a mean, ``[sites, width]``, that is not finite or beyond the dtype."""
    for site, row in zip(sites, mean, strict=True):
        if not np.isfinite(row).all():
            raise InterventionError(
                "not_finite",
                f"The mean of {site} that `{op.name}` captures is not finite: some of its values are not, or "
                "their sum is beyond float32. Capture them with `reduce` none to see them.",
            )
        if np.abs(row).max(initial=0.0) > LARGEST[dtype]:
            raise _beyond(dtype, f"`{op.name}` captures the mean of {site}, of which a")


def _beyond(dtype: str, beginning: str) -> InterventionError:
    """Return the error; ``beginning`` is its sentence up to the word number."""
    return InterventionError(
        "not_finite",
        f"{beginning} number is beyond {dtype}, whose largest is {LARGEST[dtype]:g}; ask for `dtype` "
        f"{WIDER.get(dtype, 'float32')}.",
    )


def _lens_layers(op: PlannedOp, records: list[StepRecord]) -> dict[int, LensRows]:
    """Return the lens of each layer; the parts of records are as ``StepRecord`` says."""
    top, targets = (len(op.sites), op.top_k), (len(op.sites), len(op.targets))
    ids, logprobs = _join(records, 0, top, np.int32), _join(records, 1, top, np.float32)
    of_targets, ranks = _join(records, 2, targets, np.float32), _join(records, 3, targets, np.int32)
    return {
        site.layer: LensRows(ids[:, i], logprobs[:, i], tuple(op.targets), of_targets[:, i], ranks[:, i])
        for i, site in enumerate(op.sites)
    }


def _features(op: PlannedOp, positions: list[int], records: list[StepRecord]) -> CollectedFeatures:
    """Return the features of all positions; records have ids only of the most active ones (``top_k``)."""
    features = op.features
    if features is None:
        raise RuntimeError("the operation has no features")
    num = features.top_k or len(features.ids)
    activations = _join(records, 1 if features.top_k else 0, (num,), np.float32)
    ids = (
        _join(records, 0, (num,), np.int32)
        if features.top_k
        else np.broadcast_to(np.array(features.ids, np.int32), activations.shape)
    )
    return CollectedFeatures(op.name, positions, ids, activations, drops_zeros=bool(features.top_k))


def captured_patterns(
    op: PlannedOp, records: Sequence[StepRecord], *, num_heads: int, dtype: str
) -> dict[str, TensorResult]:
    """Return the captured patterns by point, ``[positions, heads, last position + 1]``, padded with zeros.

    Reduced ``[heads, last + 1]``; without positions ``[0, heads, 0]`` in both cases.
    """
    item = np.dtype(f"u{ITEM_BYTES[dtype]}")
    num_rows = sum(len(record.positions) for record in records)
    num_keys = _num_keys(records[-1])
    values = np.zeros((len(op.sites), num_rows, num_heads, num_keys), item)
    start = 0
    for record in records:
        record_rows, record_keys = len(record.positions), _num_keys(record)
        part = np.frombuffer(record.parts[0], item).reshape(
            len(op.sites), record_rows, num_heads, record_keys
        )
        values[:, start : start + record_rows, :, :record_keys] = part
        start += record_rows
    rows = (num_rows,) if op.reduce == "none" or not num_rows else ()
    shape = (*rows, num_heads, num_keys)
    return {
        str(site): TensorResult(dtype, shape, site_values.tobytes())
        for site, site_values in zip(op.sites, values, strict=True)
    }


def _num_keys(record: StepRecord) -> int:
    return record.positions[-1] + 1 if record.positions else 0


NUM_LENS_PARTS = 4
"""Number of parts of a lens record, see ``StepRecord``. Other records have at most one per site plus one."""


class RequestCollector:
    """Collects the payloads of one request; ``op_names`` are the operations' names for the user."""

    def __init__(
        self,
        plan: RequestPlan,
        spec: ModelSpec,
        *,
        prompt_token_ids: Sequence[int],
        op_names: Sequence[str],
    ) -> None:
        self._op_names = tuple(op_names)
        self._plan = plan
        self._spec = spec
        self._prompt_token_ids = list(prompt_token_ids)
        self._waiting: list[StepRecord] = []
        self._reduced: dict[int, StepRecord] = {}
        self._recorded_ops: set[int] = set()
        self.is_stopped = False
        self._gates: dict[int, list[StepRecord]] = defaultdict(list)
        self._info: StepInfo | None = None
        self.failure: Failure | None = None

    def add(self, payload: Payload) -> None:
        """Add a payload; its reductions replace earlier ones, because each is of all positions so far."""
        for record in payload.records:
            self._recorded_ops.add(record.op)
            op = self._plan.ops[record.op]
            self.is_stopped |= op.kind is OperationKind.STOP and any(record.parts[0])
            if not op.reads:
                self._gates[record.op].append(record)
            elif op.reduce == "none":
                self._waiting.append(record)
            else:
                self._reduced[record.op] = record
        self._info = payload.info or self._info
        self.failure = payload.failure or self.failure

    @property
    def spent_s(self) -> float:
        return 0.0 if self._info is None else self._info.spent_s

    def take_part(self, num_delivered_tokens: int) -> CollectedResults | None:
        """Return results of the first ``num_delivered_tokens`` tokens that were not returned yet, or None."""
        # The token at index k was sampled at position prompt_len - 1 + k.
        last_position = self._plan.prompt_len + num_delivered_tokens - 2
        ready: list[StepRecord] = []
        waiting: list[StepRecord] = []
        for record in self._waiting:
            # Images are encoded before the first token.
            is_due = self._plan.ops[record.op].is_in_encoder or record.positions[-1] <= last_position
            (ready if is_due else waiting).append(record)
        if not ready:
            return None
        self._waiting = waiting
        return CollectedResults(results=assemble(self._plan, self._spec, ready), final=False)

    def take_final(self, generated_token_ids: Sequence[int]) -> CollectedResults:
        """Return all results not returned yet, the positions of each operation, and the provenance.

        Raises ``intervention_failed`` for too few computed positions, ``not_finite`` beyond a dtype.
        """
        info = self._checked_info(len(generated_token_ids))
        applied = self._applied(info, generated_token_ids)
        records = [*self._waiting, *self._reduced.values(), *self._empty_records()]
        self._waiting, self._reduced = [], {}
        return CollectedResults(
            results=assemble(self._plan, self._spec, records),
            final=True,
            applied=applied,
            fingerprint=self._plan.fingerprint,
            cached_tokens=max(info.first_position, 0),
            recomputed_tokens=info.recomputed_tokens,
            tier=info.tier,
            drafted_rows=info.drafted_rows,
            refused_rows=info.refused_rows,
        )

    def _checked_info(self, num_generated: int) -> StepInfo:
        """Return the worker's progress; raise unless it has met all positions, or the request was stopped."""
        info = self._info
        # The last token is sampled and never fed back.
        num_fed = self._plan.prompt_len + max(num_generated - 1, 0)
        is_complete = info is not None and (self.is_stopped or info.end_position >= num_fed)
        if info is None or not is_complete:
            seen = 0 if info is None else info.end_position
            raise InterventionError(
                "intervention_failed",
                f"the worker met {seen} of {num_fed} positions with this request's operations, so the answer "
                "is not what was asked for; this is a defect of the server, please report it",
            )
        return info

    def _empty_records(self) -> list[StepRecord]:
        """Return an empty record for each read that matched no position, so that its name has a result."""
        return [
            StepRecord(index, [], [b""] * max(len(op.sites) + 1, NUM_LENS_PARTS))
            for index, op in enumerate(self._plan.ops)
            if op.reads and index not in self._recorded_ops
        ]

    def _applied(self, info: StepInfo, generated_token_ids: Sequence[int]) -> list[CollectedSites]:
        """Return the positions of each operation, cached ones included: their keys and values contain it."""
        token_ids = np.asarray([*self._prompt_token_ids, *generated_token_ids], np.int64)
        # A sampled token that was never fed back has no position of its own.
        end = min(info.end_position, len(token_ids))
        positions = np.arange(end, dtype=np.int64)
        return [
            CollectedSites(
                op=name,
                at=[str(site) for site in op.sites],
                positions=self._positions(index, op, positions, token_ids[:end]),
                decides=_decides(op),
            )
            for index, (name, op) in enumerate(zip(self._op_names, self._plan.ops, strict=True))
        ]

    def _positions(self, index: int, op: PlannedOp, positions: Positions, token_ids: Positions) -> list[int]:
        """Return where an operation has acted; a write with a condition reports that itself, as its gate."""
        if op.when is None or op.reads:
            return _matching_positions(op, self._plan, positions, token_ids)
        end = len(positions)
        return [position for position in gated_positions(self._gates[index]) if position < end]


def _decides(op: PlannedOp) -> list[str] | None:
    """Return for each test which position it decides for, as ``CollectedSites`` says."""
    return None if op.when is None else ["next" if test.is_next else "same" for test in op.when.tests]


def _matching_positions(
    op: PlannedOp, plan: RequestPlan, positions: Positions, token_ids: Positions
) -> list[int]:
    """Return the positions that an operation's rule matches; in the vision encoder, rows."""
    if op.is_in_encoder:
        return list(op.where.positions or ())
    parts = None if plan.answer is None else plan.answer.parts(token_ids, plan.prompt_len)
    named = evaluate(op.where, positions, token_ids, plan.prompt_len, parts)
    if op.sites[0] == SAMPLES:
        # Nothing is sampled before the prompt's last position.
        named &= positions >= plan.prompt_len - 1
    met: list[int] = positions[named].tolist()
    return met
