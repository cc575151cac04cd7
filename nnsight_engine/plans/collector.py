"""Reassembles the payloads of one choice in the API process.

Payloads arrive in order, one with each output that carries results. ``take_part`` returns the
results of the tokens delivered so far, so that a stream sends each token's results with that
token even when the engine is ahead of the reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.core.dtypes import LARGEST, WIDER
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tensor_bytes import DTYPES, tensor_to_bytes
from nnsight_engine.plans.builder import leaf_width, may_overflow, width_classes
from nnsight_engine.plans.collected import (
    CollectedCapture,
    CollectedLens,
    CollectedProbe,
    CollectedResults,
    CollectedSites,
    CollectedToken,
    LensRow,
    TensorResult,
)
from nnsight_engine.plans.pattern_results import captured_patterns
from nnsight_engine.plans.records import Failure, Payload, StepInfo, StepRecord
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, PlannedSite, RequestPlan
from nnsight_engine.plans.where import Positions, evaluate

_ITEM_DTYPES: dict[str, type[np.generic]] = {
    "float32": np.uint32,
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "int64": np.uint64,
}
"""Unsigned integer type of each dtype's size: values are moved with it, never computed with."""

NUM_LENS_PARTS = 4
"""Number of parts of a lens record, see ``StepRecord``. Other records have at most one per site plus one."""

Values = npt.NDArray[np.generic]


class RequestCollector:
    """Assembles the results of one choice.

    Args:
        plan: The request's plan.
        spec: The model's description.
        prompt_token_ids: The prompt.
        op_names: The request's name for each operation of the plan.

    Attributes:
        failure: Why the request failed in the worker, or None.
    """

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
        self._seen: set[int] = set()
        self._info: StepInfo | None = None
        self.failure: Failure | None = None

    def add(self, payload: Payload) -> None:
        """Store the records of one payload."""
        for record in payload.records:
            self._seen.add(record.op)
            if self._plan.ops[record.op].reduce == "none":
                self._waiting.append(record)
            else:
                self._reduced[record.op] = record
        self._info = payload.info or self._info
        self.failure = payload.failure or self.failure

    @property
    def spent_s(self) -> float:
        """Seconds spent on the operations in the worker, as last reported."""
        return 0.0 if self._info is None else self._info.spent_s

    def take_part(self, num_delivered_tokens: int) -> CollectedResults | None:
        """Return results of the first ``num_delivered_tokens`` tokens that were not returned yet, or None."""
        # The token at index k was sampled at position prompt_len - 1 + k.
        last_position = self._plan.prompt_len + num_delivered_tokens - 2
        ready = [record for record in self._waiting if record.positions[-1] <= last_position]
        if not ready:
            return None
        self._waiting = [record for record in self._waiting if record.positions[-1] > last_position]
        return CollectedResults(results=self._assemble(ready), final=False)

    def take_final(self, generated_token_ids: Sequence[int]) -> CollectedResults:
        """Return all results not returned yet, the positions of each operation, and the provenance.

        Raises:
            InterventionError: ``intervention_failed`` if the worker computed too few positions;
                ``not_finite`` if a captured value exceeds its dtype.
        """
        info = self._checked_info(len(generated_token_ids))
        applied = self._applied(info, generated_token_ids)
        records = [*self._waiting, *self._reduced.values(), *self._empty_records()]
        self._waiting, self._reduced = [], {}
        return CollectedResults(
            results=self._assemble(records),
            final=True,
            applied=applied,
            fingerprint=self._plan.fingerprint,
            cached_tokens=max(info.first_position, 0),
            recomputed_tokens=info.recomputed_tokens,
            tier=info.tier,
        )

    def _checked_info(self, num_generated: int) -> StepInfo:
        """Return the worker's progress, or raise if it is less than the response needs."""
        info = self._info
        # The last token is sampled and never fed back.
        num_fed = self._plan.prompt_len + max(num_generated - 1, 0)
        if info is None or info.end_position < num_fed:
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
            if op.reads and index not in self._seen
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
                positions=_matching_positions(op, self._plan.prompt_len, positions, token_ids[:end]),
            )
            for name, op in zip(self._op_names, self._plan.ops, strict=True)
        ]

    def _assemble(self, records: list[StepRecord]) -> list[CollectedCapture | CollectedProbe | CollectedLens]:
        by_op: dict[int, list[StepRecord]] = defaultdict(list)
        for record in records:
            by_op[record.op].append(record)
        return [self._result(self._plan.ops[index], by_op[index]) for index in sorted(by_op)]

    def _result(
        self, op: PlannedOp, records: list[StepRecord]
    ) -> CollectedCapture | CollectedProbe | CollectedLens:
        positions = [position for record in records for position in record.positions]
        match op.kind:
            case OperationKind.PROBE:
                values = _join(records, 0, (-1, len(op.sites)), np.float32)
                points = {str(site): values[:, i].tolist() for i, site in enumerate(op.sites)}
                return CollectedProbe(op.name, positions, points)
            case OperationKind.LENS:
                return CollectedLens(op.name, positions, _lens_layers(op, records))
            case _:
                return CollectedCapture(op.name, positions, op.reduce, self._captured(op, records))

    def _captured(self, op: PlannedOp, records: list[StepRecord]) -> dict[str, TensorResult]:
        dtype = op.dtype or self._spec.dtype
        if op.sites[0].leaf == "samples":
            dtype = "int64"
        if op.captures_patterns:
            num_heads = leaf_width(op.sites[0], self._spec)
            return captured_patterns(op, records, num_heads=num_heads, dtype=dtype)
        if may_overflow(op, self._spec):
            _check_overflows(op, records)
        points: dict[int, TensorResult] = {}
        # A reduction over no positions has no rows, like an unreduced capture without positions.
        has_rows = op.reduce == "none" or not records[-1].positions
        for part, indices in enumerate(width_classes(op, self._spec)):
            width = leaf_width(op.sites[indices[0]], self._spec)
            if has_rows:
                values = _join(records, part, (-1, len(indices), width), _ITEM_DTYPES[dtype])
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
                leaf = self._spec.leaf(op.sites[index].leaf)
                shape = () if leaf is None else leaf.shape
                rows = values[place].shape[:-1] if has_rows else ()
                points[index] = TensorResult(dtype, (*rows, *shape), values[place].tobytes())
        return {str(op.sites[index]): points[index] for index in sorted(points)}


def _matching_positions(
    op: PlannedOp, prompt_len: int, positions: Positions, token_ids: Positions
) -> list[int]:
    """Return the computed positions that match the operation's rule."""
    named = evaluate(op.where, positions, token_ids, prompt_len)
    if op.sites[0].leaf == "samples":
        # Nothing is sampled before the prompt's last position.
        named &= positions >= prompt_len - 1
    met: list[int] = positions[named].tolist()
    return met


def _join(records: list[StepRecord], part: int, shape: tuple[int, ...], dtype: type[np.generic]) -> Values:
    """Return one part of all records, concatenated along the rows (the first axis)."""
    pieces = [np.frombuffer(record.parts[part], dtype).reshape(shape) for record in records]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _cast(values: npt.NDArray[np.float32], dtype: str) -> Values:
    """Return float32 values rounded to ``dtype``, as unsigned integers of its size."""
    rounded = torch.from_numpy(values).to(DTYPES[dtype])
    return np.frombuffer(tensor_to_bytes(rounded), _ITEM_DTYPES[dtype]).reshape(values.shape)


def _check_overflows(op: PlannedOp, records: list[StepRecord]) -> None:
    """Raise if a capture contains numbers beyond its dtype; the last part of each record flags such rows.

    Raises:
        InterventionError: ``not_finite``.
    """
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
    """Raise if a mean is not finite, or exceeds its dtype.

    Raises:
        InterventionError: ``not_finite``.
    """
    for site, row in zip(sites, mean, strict=True):
        if not np.isfinite(row).all():
            raise InterventionError(
                "not_finite",
                f"The mean of {site} that `{op.name}` captures is not finite: some of its values are not, or "
                "their sum is beyond float32. Capture them with `reduce` none to see them.",
            )
        if np.abs(row).max(initial=0.0) > LARGEST[dtype]:
            raise _beyond(dtype, f"`{op.name}` captures the mean of {site}, of which a")


def _beyond(dtype: str, what: str) -> InterventionError:
    return InterventionError(
        "not_finite",
        f"{what} number is beyond {dtype}, whose largest is {LARGEST[dtype]:g}; ask for `dtype` "
        f"{WIDER.get(dtype, 'float32')}.",
    )


def _lens_layers(op: PlannedOp, records: list[StepRecord]) -> dict[int, list[LensRow]]:
    num_sites, num_targets = len(op.sites), len(op.targets)
    layers: dict[int, list[LensRow]] = {site.layer: [] for site in op.sites}
    for record in records:
        num_rows = len(record.positions)
        ids = np.frombuffer(record.parts[0], np.int32).reshape(num_rows, num_sites, op.top_k)
        logprobs = np.frombuffer(record.parts[1], np.float32).reshape(num_rows, num_sites, op.top_k)
        of_targets = np.frombuffer(record.parts[2], np.float32).reshape(num_rows, num_sites, num_targets)
        ranks = np.frombuffer(record.parts[3], np.int32).reshape(num_rows, num_sites, num_targets)
        for i, site in enumerate(op.sites):
            for row in range(num_rows):
                top = [
                    CollectedToken(token, logprob)
                    for token, logprob in zip(ids[row, i].tolist(), logprobs[row, i].tolist(), strict=True)
                ]
                targets = [
                    CollectedToken(token, logprob, rank)
                    for token, logprob, rank in zip(
                        op.targets, of_targets[row, i].tolist(), ranks[row, i].tolist(), strict=True
                    )
                ]
                layers[site.layer].append((top, targets))
    return layers
