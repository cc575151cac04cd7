"""Reassembles the attention patterns of a request in the API process.

Rows of a pattern grow with the position while a tensor has one shape, so shorter rows are padded
with zeros: a query does not attend to keys that it cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.plans.collected import TensorResult
from nnsight_engine.plans.records import StepRecord
from nnsight_engine.plans.request_plan import PlannedOp


def captured_patterns(
    op: PlannedOp, records: Sequence[StepRecord], *, num_heads: int, dtype: str
) -> dict[str, TensorResult]:
    """Return the captured patterns by point.

    Args:
        op: The operation; all its sites are patterns.
        records: Its records, in the order of their positions; one if reduced.
        num_heads: Query heads of the model.
        dtype: Dtype of the records' values, which are moved and never computed with.

    Returns:
        ``[positions, heads, last position + 1]`` for each site, reduced ``[heads, last + 1]``; without
        positions ``[0, heads, 0]`` in both cases.
    """
    item = np.dtype(f"u{ITEM_BYTES[dtype]}")
    num_rows = sum(len(record.positions) for record in records)
    num_keys = _num_keys(records[-1])
    values = np.zeros((len(op.sites), num_rows, num_heads, num_keys), item)
    start = 0
    for record in records:
        own_rows, own_keys = len(record.positions), _num_keys(record)
        part = np.frombuffer(record.parts[0], item).reshape(len(op.sites), own_rows, num_heads, own_keys)
        values[:, start : start + own_rows, :, :own_keys] = part
        start += own_rows
    rows = (num_rows,) if op.reduce == "none" or not num_rows else ()
    shape = (*rows, num_heads, num_keys)
    return {
        str(site): TensorResult(dtype, shape, own.tobytes())
        for site, own in zip(op.sites, values, strict=True)
    }


def _num_keys(record: StepRecord) -> int:
    """Return the row length of a record, 0 for a record without positions."""
    return record.positions[-1] + 1 if record.positions else 0
