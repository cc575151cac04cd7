"""Reads and validates a request's tensors; the dtype is kept, and all numbers are finite afterwards.

Several vectors of an operation become one tensor: their weighted sum, or a basis of their span. Neither
depends on a prompt, so a call with several prompts combines once, and before any of them is compiled: a basis
of many vectors takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.interventions import FIELD, Intervention
from api_schemas.operations import Steer
from api_schemas.tensors import TensorInput, TensorObject, VectorName
from nnsight_engine.core.dtypes import LARGEST, LARGEST_WEIGHT, Floats, floats_from_bytes
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.compile.scope import leaf_of, resolve_sites
from nnsight_engine.plans.request_plan import PlannedSite, TensorData

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
    """Return a patch's tensor with the rows of its positions in another order."""
    if list(order) == list(range(len(order))):
        return tensor
    items = np.frombuffer(tensor.data, _ITEM_TYPES[tensor.dtype]).reshape(tensor.shape)
    return TensorData(tensor.dtype, tensor.shape, items[..., list(order), :].tobytes())


def _wrong_width(shape: tuple[int, ...], widths: Sequence[int], rows: str, param: str) -> ApiError:
    """Return the error; ``rows`` is what the expected shape has before the width, such as ``5, ``."""
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


MAX_BYTES: Final = 64 * 2**20
"""Bytes in float32 of the vectors that one request combines, after ``[width]`` is repeated for each point."""

INDEPENDENT: Final = 1e-6
"""Singular values below this part of the largest are those of linearly dependent vectors."""

_Doubles = npt.NDArray[np.float64]


class CombinedVectors:
    """The combinations of a request's vectors, kept by the field's path of their operation."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._combined: dict[str, TensorData] = {}
        self._num_bytes = 0

    def prepare(self, operations: Sequence[Intervention]) -> None:
        """Combine the vectors of a request's operations; raise as ``combine``, or for a missing point."""
        for index, op in enumerate(operations):
            if isinstance(op, Steer) and op.vectors is not None:
                param = f"{FIELD}.{index}"
                self.combine(op, resolve_sites(op.at, op.op, self._spec, f"{param}.at"), param)

    def combine(self, op: Steer, sites: Sequence[PlannedSite], param: str) -> TensorData:
        """Return the combination of an operation's vectors, float32; ``[sites, …]`` if one differs by site.

        ``project_out`` gets an orthonormal basis, ``[k, width]``, with zeros at a site with fewer directions.
        Raises ``wrong_width``, ``not_finite``, ``invalid_value`` (no direction) or ``tensor_too_large``.
        """
        if param not in self._combined:
            widths = [leaf_of(site, self._spec).width for site in sites]
            vectors = self._read(op, widths, param)
            if op.mode == "project_out":
                combined = _bases(vectors)
            else:
                weights = [vector.weight for vector in op.vectors or ()]
                combined = _sum(vectors, weights, f"{param}.vectors")
            self._combined[param] = TensorData("float32", combined.shape, combined.astype("<f4").tobytes())
        return self._combined[param]

    def _read(self, op: Steer, widths: Sequence[int], param: str) -> list[_Doubles]:
        """Return an operation's vectors in float64, checked; their bytes count toward the request's limit."""
        tensors: dict[str, TensorData] = {}
        for index, vector in enumerate(op.vectors or ()):
            path = f"{param}.vectors.{index}.vector"
            tensors[path] = read_tensor(vector.vector, path)
            check_rows(tensors[path], widths, path)
            if op.mode == "project_out":
                check_directions(tensors[path], op.mode, path)
        if op.mode == "project_out" and len(tensors) > min(widths):
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"`project_out` takes at most as many vectors as the point's width, {min(widths)}; got "
                f"{len(tensors)}.",
                f"{param}.vectors",
            )
        self._count(tensors, param)
        return [
            floats_from_bytes(tensor.dtype, tensor.data).reshape(tensor.shape).astype(np.float64)
            for tensor in tensors.values()
        ]

    def _count(self, tensors: Mapping[str, TensorData], param: str) -> None:
        """Count the bytes of vectors, each as the largest of them; raise ``tensor_too_large``."""
        sizes = [int(np.prod(tensor.shape)) for tensor in tensors.values()]
        self._num_bytes += 4 * len(sizes) * max(sizes)
        if self._num_bytes > MAX_BYTES:
            raise ApiError(
                ErrorCode.TENSOR_TOO_LARGE,
                f"The `vectors` of one request may have {MAX_BYTES} bytes together, four a number, and "
                "those of an operation count for each point if one of them has a row for each; name fewer "
                "vectors or points.",
                f"{param}.vectors",
            )


def _sum(vectors: Sequence[_Doubles], weights: Sequence[float], param: str) -> _Doubles:
    total: _Doubles = np.zeros((), np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        for weight, vector in zip(weights, vectors, strict=True):
            total = total + weight * vector
    largest = float(np.abs(total).max(initial=0.0))
    if not largest <= LARGEST["float32"]:
        raise ApiError(
            ErrorCode.NOT_FINITE,
            f"The sum of the vectors times their weights must be finite in float32, got {largest:g}; give "
            "smaller weights.",
            param,
        )
    return total


def _bases(vectors: Sequence[_Doubles]) -> _Doubles:
    """Return a basis ``[k, width]``; if a vector differs by site, one for each, padded with zeros."""
    stacked = np.stack(np.broadcast_arrays(*vectors), axis=-2)
    if stacked.ndim == len(("k", "width")):
        return _basis(stacked)
    bases = [_basis(rows) for rows in stacked]
    padded = np.zeros((len(bases), max(map(len, bases)), stacked.shape[-1]))
    for row, basis in zip(padded, bases, strict=True):
        row[: len(basis)] = basis
    return padded


def _basis(rows: _Doubles) -> _Doubles:
    """Return an orthonormal basis of the span of ``rows``, ``[rows, width]``, no more of them than the width.

    The rows are made as long as each other first, so that a short vector is not taken for a dependent one.
    """
    units = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    orthonormal, triangular = np.linalg.qr(units.T)
    directions, sizes, _ = np.linalg.svd(triangular)
    basis: _Doubles = (orthonormal @ directions[:, sizes >= INDEPENDENT * sizes[0]]).T
    return basis
