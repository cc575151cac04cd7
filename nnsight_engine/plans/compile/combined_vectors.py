"""Combines the several vectors of an operation: their weighted sum, or a basis of their span.

Neither depends on a prompt, so a call with several prompts combines once, and before any of them is compiled:
a basis of many vectors takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD, Intervention
from api_schemas.operations import Steer
from nnsight_engine.core.dtypes import LARGEST, floats_from_bytes
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.compile.sites import leaf_of, resolve_sites
from nnsight_engine.plans.compile.tensors import check_directions, check_rows, read_tensor
from nnsight_engine.plans.request_plan import TensorData
from nnsight_engine.plans.sites import PlannedSite

MAX_BYTES: Final = 64 * 2**20
"""Bytes in float32 of the vectors that one request combines, after ``[width]`` is repeated for each point."""

INDEPENDENT: Final = 1e-6
"""Singular values below this part of the largest are those of linearly dependent vectors."""

_Doubles = npt.NDArray[np.float64]


class CombinedVectors:
    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._found: dict[str, TensorData] = {}
        self._num_bytes = 0

    def prepare(self, operations: Sequence[Intervention]) -> None:
        """Combine the vectors of all operations of a request; raise as ``of``, or for a missing point."""
        for index, op in enumerate(operations):
            if isinstance(op, Steer) and op.vectors is not None:
                param = f"{FIELD}.{index}"
                self.of(op, resolve_sites(op.at, op.op, self._spec, f"{param}.at"), param)

    def of(self, op: Steer, sites: Sequence[PlannedSite], param: str) -> TensorData:
        """Return the combination of an operation's vectors, float32; ``[sites, …]`` if one differs by site.

        ``project_out`` gets an orthonormal basis, ``[k, width]``, with zeros at a site with fewer directions.
        Raises ``wrong_width``, ``not_finite``, ``invalid_value`` (no direction) or ``tensor_too_large``.
        """
        if param not in self._found:
            widths = [leaf_of(site, self._spec).width for site in sites]
            vectors = self._read(op, widths, param)
            if op.mode == "project_out":
                combined = _bases(vectors)
            else:
                weights = [one.weight for one in op.vectors or ()]
                combined = _sum(vectors, weights, f"{param}.vectors")
            self._found[param] = TensorData("float32", combined.shape, combined.astype("<f4").tobytes())
        return self._found[param]

    def _read(self, op: Steer, widths: Sequence[int], param: str) -> list[_Doubles]:
        tensors: dict[str, TensorData] = {}
        for index, one in enumerate(op.vectors or ()):
            path = f"{param}.vectors.{index}.vector"
            tensors[path] = read_tensor(one.vector, path)
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
            floats_from_bytes(one.dtype, one.data).reshape(one.shape).astype(np.float64)
            for one in tensors.values()
        ]

    def _count(self, tensors: Mapping[str, TensorData], param: str) -> None:
        sizes = [int(np.prod(one.shape)) for one in tensors.values()]
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
