"""The effect of a ``steer`` in numbers that kernels take, checked against the model's dtype."""

from __future__ import annotations

from typing import Final

import msgspec

from api_schemas.operations import Steer
from nnsight_engine.plans.compile.tensors import check_directions, check_float32, check_range, check_within
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, TensorData

_NEED_DIRECTION: Final = frozenset({"norm_match", "project_out", "clamp", "affine"})


def with_effect(planned: PlannedOp, op: Steer, tensor: TensorData, dtype: str, param: str) -> PlannedOp:
    """Return a planned ``steer`` with its kind and its numbers.

    Raises ``invalid_value`` for a vector without a direction, ``not_finite`` beyond a dtype.
    """
    field = f"{param}.{'vector' if op.vectors is None else 'vectors'}"
    is_subspace = op.mode == "project_out" and op.vectors is not None
    if op.mode in _NEED_DIRECTION and not is_subspace:
        check_directions(tensor, op.mode, field)
    scale = check_float32(1.0 if op.scale is None else op.scale, f"{param}.scale")
    match op.mode:
        case "add" | "replace":
            check_range(tensor, scale, dtype, field if abs(scale) <= 1 else f"{param}.scale")
            kind = OperationKind(op.mode)
        case "norm_match":
            kind = OperationKind.NORM_MATCH
        case "project_out":
            kind = OperationKind.SUBSPACE if is_subspace else OperationKind.PROJECT
        case "clamp" | "affine":
            return _projected(planned, op, scale, dtype, param)
    return msgspec.structs.replace(planned, kind=kind, scale=scale)


def _projected(planned: PlannedOp, op: Steer, scale: float, dtype: str, param: str) -> PlannedOp:
    removed, offset = 1.0, scale
    if op.mode == "affine":
        removed = 1.0 - check_float32(1.0 if op.gain is None else op.gain, f"{param}.gain")
        offset = check_within(op.offset or 0.0, dtype, f"{param}.offset")
    elif op.has_bounds:
        removed, offset = 0.0, 0.0
    else:
        check_within(scale, dtype, f"{param}.scale")
    low, high = (
        None if bound is None else check_within(bound, dtype, f"{param}.{field}")
        for field, bound in (("low", op.low), ("high", op.high))
    )
    return msgspec.structs.replace(
        planned, kind=OperationKind.PROJECT, scale=removed, offset=offset, low=low, high=high
    )
