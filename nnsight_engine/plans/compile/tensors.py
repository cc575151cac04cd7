"""Reads and validates a request's tensors; the dtype is kept, and all numbers are finite afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from api_schemas.tensors import TensorInput, TensorObject, VectorName
from nnsight_engine.core.dtypes import LARGEST, LARGEST_WEIGHT, Floats, floats_from_bytes
from nnsight_engine.plans.request_plan import TensorData

MIN_NORM: Final = 1e-15
MAX_NORM: Final = 1e18
"""Bounds of norms whose squares are safe in float32."""

_ITEM_TYPES: Final = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


def read_tensor(value: TensorInput, param: str) -> TensorData:
    """Return a tensor; raise ``unknown_vector`` or ``not_finite``, also beyond float32's range in lists."""
    if isinstance(value, VectorName):
        raise ApiError(
            ErrorCode.UNKNOWN_VECTOR,
            f"A vector's name means nothing without the server that keeps it, got {clip(value.name)!r}; "
            "give numbers or a tensor object.",
            param,
        )
    if isinstance(value, TensorObject):
        tensor = TensorData(value.dtype, tuple(value.shape), value.raw)
        floats = floats_from_bytes(value.dtype, value.raw)
    else:
        with np.errstate(over="ignore"):
            floats = np.asarray(value, np.float64).astype("<f4")
        tensor = TensorData("float32", floats.shape, floats.tobytes())
    if not np.isfinite(floats).all():
        index = int(np.flatnonzero(~np.isfinite(floats.reshape(-1)))[0])
        raise ApiError(
            ErrorCode.NOT_FINITE,
            f"Every number of a tensor must be finite in {tensor.dtype}; number {index} (counted flat) is "
            "not.",
            param,
        )
    return tensor


def check_range(tensor: TensorData, scale: float, dtype: str, param: str) -> None:
    """Check that the tensor times ``scale`` is finite in ``dtype``."""
    floats = floats_from_bytes(tensor.dtype, tensor.data)
    largest = float(np.abs(floats).max(initial=0.0)) * abs(scale)
    if largest > LARGEST[dtype]:
        times, smaller = "", "smaller numbers"
        if scale != 1.0:
            times, smaller = ", times `scale`,", "a smaller scale"
        raise ApiError(
            ErrorCode.NOT_FINITE,
            f"Every number of a tensor{times} must be finite in {dtype}, the model's dtype, whose largest is "
            f"{LARGEST[dtype]:g}; got {largest:g}. Send {smaller}.",
            param,
        )


def read_weights(value: TensorInput, param: str) -> TensorData:
    """Return a tensor that activations are multiplied with; also refuse more than ``LARGEST_WEIGHT``."""
    tensor = read_tensor(value, param)
    largest = float(np.abs(floats_from_bytes(tensor.dtype, tensor.data)).max(initial=0.0))
    if largest > LARGEST_WEIGHT:
        raise ApiError(
            ErrorCode.NOT_FINITE,
            f"A weight may be {LARGEST_WEIGHT:g} in size, so that scores are finite in float32; got "
            f"{largest:g}.",
            param,
        )
    return tensor


def check_float32(number: float, param: str) -> float:
    return check_within(number, "float32", param)


def check_within(number: float, dtype: str, param: str) -> float:
    if abs(number) > LARGEST[dtype]:
        raise ApiError(
            ErrorCode.NOT_FINITE,
            f"A number must be finite in {dtype}, whose largest is {LARGEST[dtype]:g}; got {number:g}.",
            param,
        )
    return number


def check_rows(tensor: TensorData, widths: Sequence[int], param: str) -> None:
    """Check that the tensor is ``[width]`` or ``[sites, width]``; raise ApiError ``wrong_width``."""
    shape = tensor.shape
    fits = len(shape) == 1 or (len(shape) == len(("sites", "width")) and shape[0] == len(widths))
    if not fits or any(width != shape[-1] for width in widths):
        raise _wrong_width(shape, widths, "", param)


def check_patch(tensor: TensorData, widths: Sequence[int], num_positions: int, param: str) -> None:
    """Check that the tensor is ``[positions, width]`` or ``[sites, positions, width]``."""
    shape = tensor.shape
    per_site = len(shape) == len(("sites", "positions", "width")) and shape[0] == len(widths)
    fits = per_site or len(shape) == len(("positions", "width"))
    if not fits or any(width != shape[-1] for width in widths):
        raise _wrong_width(shape, widths, f"{num_positions}, ", param)
    if shape[-2] != num_positions:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A patch needs one row for each of its {num_positions} positions, got {shape[-2]} rows.",
            param,
        )


def check_directions(tensor: TensorData, mode: str, param: str) -> None:
    """Check that every row has a direction (a usable norm); raise ApiError ``invalid_value``."""
    rows: Floats = floats_from_bytes(tensor.dtype, tensor.data).reshape(-1, tensor.shape[-1])
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    if not ((norms >= MIN_NORM) & (norms <= MAX_NORM)).all():
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"`{mode}` needs the vector's direction, so its norm must lie between {MIN_NORM} and {MAX_NORM}; "
            f"got {norms.min():g}{'' if len(norms) == 1 else f' to {norms.max():g}'}.",
            param,
        )


def check_experts(tensor: TensorData, num_experts: int, param: str) -> None:
    """Check that every row has ids of different experts."""
    rows: Floats = floats_from_bytes(tensor.dtype, tensor.data).reshape(-1, tensor.shape[-1])
    if not ((rows >= 0) & (rows < num_experts) & (rows == np.floor(rows))).all():
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"Ids of experts are whole numbers from 0 to {num_experts - 1}; got {rows.min():g} to "
            f"{rows.max():g}.",
            param,
        )
    ordered = np.sort(rows, axis=-1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ApiError(ErrorCode.INVALID_VALUE, "Each of a token's experts may be named once.", param)


def reorder_rows(tensor: TensorData, order: Sequence[int]) -> TensorData:
    if list(order) == list(range(len(order))):
        return tensor
    items = np.frombuffer(tensor.data, _ITEM_TYPES[tensor.dtype]).reshape(tensor.shape)
    return TensorData(tensor.dtype, tensor.shape, items[..., list(order), :].tobytes())


def _wrong_width(shape: tuple[int, ...], widths: Sequence[int], rows: str, param: str) -> ApiError:
    different = sorted(set(widths))
    if len(different) > 1:
        return ApiError(
            ErrorCode.WRONG_WIDTH,
            f"One tensor serves points of one width, these have {', '.join(map(str, different))}; "
            "use one operation per width.",
            param,
        )
    width = different[0]
    return ApiError(
        ErrorCode.WRONG_WIDTH,
        f"Expected a tensor of shape [{rows}{width}] for all points, or [{len(widths)}, {rows}{width}] with "
        f"one for each, got {list(shape)}. GET /v1/capabilities lists the widths.",
        param,
    )
