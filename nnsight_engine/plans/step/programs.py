"""From operations to instructions, see ``instructions``."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from nnsight_engine.plans.request_plan import OperationKind, PlannedOp
from nnsight_engine.plans.step.active import ActiveOp
from nnsight_engine.plans.step.instructions import DTYPE_CODES, Code, Instructions, Number, Word, Words

_CODES: Final = {
    OperationKind.ADD: Code.ADD,
    OperationKind.NORM_MATCH: Code.NORM_MATCH,
    OperationKind.PROJECT: Code.PROJECT,
    OperationKind.SUBSPACE: Code.SUBSPACE,
    OperationKind.REPLACE: Code.SET,
    OperationKind.ZERO: Code.SET,
    OperationKind.PATCH: Code.SET,
    OperationKind.FEATURE: Code.ADD,
    OperationKind.PROBE: Code.DOT,
}
"""The instruction of each operation that is the same in every step."""
_DEPENDENT: Final = (Code.NORM_MATCH, Code.PROJECT, Code.SUBSPACE)


def _kinds_with(*codes: Code) -> frozenset[OperationKind]:
    return frozenset(kind for kind, code in _CODES.items() if code in codes)


WITH_FACTORS: Final = _kinds_with(*_DEPENDENT)
"""Kinds whose instruction needs room for a number of each vector, see ``Code.NORM_MATCH``."""
NARROWED_KINDS: Final = WITH_FACTORS | {OperationKind.FEATURE}
"""Kinds of operations whose changes depend on the model's values, so that admission cannot check them."""
ALONG_VECTOR: Final = _kinds_with(Code.NORM_MATCH, Code.PROJECT)
"""Kinds whose operand is a direction, of length 1."""
IN_FLOAT32: Final = _kinds_with(*_DEPENDENT, Code.DOT)
"""Kinds whose operand is float32; that of others has the model's dtype."""


def own_program(
    op: PlannedOp, tensor: torch.Tensor | None, units: torch.Tensor | None
) -> Instructions | None:
    """Return an operation's instruction at each site, if it is one, and the same in every step.

    That of a patch is for its first position.
    """
    if op.kind not in _CODES or tensor is None:
        return None
    if len(tensor) not in {1, len(op.sites)}:
        raise RuntimeError(f"{len(tensor)} vectors are given for {len(op.sites)} sites")
    words, numbers = own = Instructions.blank(len(op.sites), _CODES[op.kind])
    words[:, Word.OPERAND] = tensor.data_ptr()
    if len(tensor) > 1:
        words[:, Word.OPERAND] += np.arange(len(op.sites)) * (tensor.stride(0) * tensor.itemsize)
    words[:, Word.DTYPE] = DTYPE_CODES[tensor.dtype]
    if units is not None:
        words[:, Word.UNITS], words[:, Word.COUNT] = units.data_ptr(), len(units)
    if op.kind is OperationKind.SUBSPACE:
        words[:, Word.COUNT], words[:, Word.DTYPE] = tensor.shape[-2], tensor.stride(-2)
    numbers[:, Number.A] = op.bias if op.kind is OperationKind.PROBE else op.offset
    numbers[:, Number.B] = op.scale
    numbers[:, Number.LOW] = -math.inf if op.low is None else op.low
    numbers[:, Number.HIGH] = math.inf if op.high is None else op.high
    return own


def reads(dtype: torch.dtype, count: int) -> Instructions:
    own = Instructions.blank(count, Code.READ)
    own.words[:, Word.DTYPE] = DTYPE_CODES[dtype]
    return own


def patch_bytes(active: ActiveOp) -> int:
    tensor = active.tensor
    if tensor is None:
        raise RuntimeError("a patch has no tensor")
    return tensor.stride(-2) * tensor.itemsize


def addresses(tensor: torch.Tensor, columns: list[int]) -> Words:
    """Return the addresses of entries of a buffer ``[rows, columns, …]``, as ``[columns, rows]``."""
    rows = np.arange(len(tensor), dtype=np.int64)[None] * tensor.stride(0)
    own = np.asarray(columns, np.int64)[:, None] * tensor.stride(1)
    found: Words = tensor.data_ptr() + (rows + own) * tensor.itemsize
    return found


def in_order(stage: int, *, is_last_part: bool = False) -> int:
    """Return the order of work at a site; the last part of a stage, such as a test, follows the others."""
    return 2 * stage + is_last_part
