"""Conversion of named tensors to the rows of a vector, the only form that is stored.

Rows have the width of the model's points, each layer has one row, and every number is finite in float32.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.points import Point, PointPattern, resolve_layer
from api_schemas.server import Capabilities
from api_schemas.vectors import Training
from app.formats.uploads import Tensors
from app.storage.versions import NewVersion

Floats = npt.NDArray[np.float32]

LAYER_PREFIX: Final = "layers.*."
RESIDUAL_LEAF: Final = "output"
"""The residual stream after a layer; the default for a tensor whose name has only a layer."""
_NAME: Final = re.compile(
    r"(?:(?:layers?|direction)[._])?(?P<layer>0|[1-9][0-9]{0,5})(?:\.(?P<leaf>[a-z][a-z0-9_.]{0,63}))?"
)


def pattern_of(leaf: str) -> str:
    return f"{LAYER_PREFIX}{leaf}"


@dataclasses.dataclass(frozen=True, slots=True)
class VectorRows:
    """The values of a vector, ``[layers, width]``; ``leaf`` is such as ``output`` of a layer."""

    leaf: str
    layers: tuple[int, ...]
    values: Floats

    @property
    def data(self) -> bytes:
        """The values, rows by layer, float32 and little-endian."""
        return np.ascontiguousarray(self.values, "<f4").tobytes()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def new_version(
        self,
        name: str,
        format_: str,
        *,
        shared: bool,
        source_sha256: str | None = None,
        training: Training | None = None,
        is_first: bool = False,
    ) -> NewVersion:
        """Return a vector to be stored; ``source_sha256`` is that of the uploaded file."""
        head = {
            "at": pattern_of(self.leaf),
            "layers": list(self.layers),
            "width": int(self.values.shape[1]),
            "format": format_,
            "source_sha256": source_sha256,
            "training": None if training is None else training.model_dump(mode="json"),
        }
        return NewVersion(name, shared, head, self.data, is_first=is_first)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """``widths``: numbers at one position, by a layer's leaf; without leaves whose width varies by layer."""

    name: str
    num_layers: int
    widths: Mapping[str, int]

    @classmethod
    def of(cls, name: str, capabilities: Capabilities) -> Self:
        widths_by_leaf: dict[str, set[int]] = {}
        for point in capabilities.points:
            if point.name.startswith(LAYER_PREFIX) and "steer" in point.operations:
                widths_by_leaf.setdefault(point.name.removeprefix(LAYER_PREFIX), set()).add(point.width)
        widths = {
            leaf: min(leaf_widths) for leaf, leaf_widths in widths_by_leaf.items() if len(leaf_widths) == 1
        }
        return cls(name, capabilities.sizes.num_layers, widths)

    @property
    def max_numbers(self) -> int:
        return self.num_layers * max(self.widths.values(), default=0)

    def width(self, leaf: str, param: str) -> int:
        """Return how many numbers a layer's ``leaf`` has at one position; ApiError ``unknown_point``."""
        width = self.widths.get(leaf)
        if width is None:
            offered = ", ".join(f"{LAYER_PREFIX}{leaf_name}" for leaf_name in self.widths)
            raise ApiError(
                ErrorCode.UNKNOWN_POINT,
                f"{self.name} has no point {clip(pattern_of(leaf))!r} that a vector could belong to; it has "
                f"{offered or 'none'}.",
                param,
            )
        return width


def rows_of(tensors: Tensors, at: str | Sequence[str] | None, shape: ModelShape, param: str) -> VectorRows:
    """Return the rows of a vector; raises ApiError for tensors without or with conflicting points.

    ``tensors`` are by layer or point, or there is one, ``[width]`` or ``[points, width]``, with its points in
    ``at``. ``param`` is the field of the request that contains them.
    """
    if not tensors:
        raise _invalid("A vector needs at least one tensor, got none.", param)
    placed = _by_name(tensors, shape, param) if at is None else _by_points(tensors, at, shape, param)
    leaves = sorted({point.leaf for point in placed})
    if len(leaves) > 1:
        raise ApiError(
            ErrorCode.VECTOR_MISMATCH,
            f"A vector belongs to points of one kind, these are {', '.join(map(pattern_of, leaves[:4]))}; "
            "make one vector of each.",
            param,
        )
    width = shape.width(leaves[0], param)
    ordered = sorted(placed, key=lambda point: point.layer)
    values = np.stack([_row(placed[point], point, width, param) for point in ordered])
    return VectorRows(leaves[0], tuple(point.layer for point in ordered), values)


def _by_name(tensors: Tensors, shape: ModelShape, param: str) -> dict[Point, npt.NDArray[Any]]:
    """Return tensors by the points that their names say; ApiError for names that say none, or one twice."""
    placed: dict[Point, npt.NDArray[Any]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise _invalid(
                "A tensor's name must say its layer, such as 10, layers.10, layers.10.output or "
                f"direction.10; got {clip(name)!r}. A file with one tensor [layers, width] may say them in "
                "`at`.",
                param,
            )
        layer = resolve_layer(int(match["layer"]), shape.num_layers, param)
        point = Point(match["leaf"] or RESIDUAL_LEAF, layer)
        if point in placed:
            raise _invalid(f"A vector has one row for each layer; two tensors are of {point}.", param)
        placed[point] = tensor
    return placed


def _by_points(
    tensors: Tensors, at: str | Sequence[str], shape: ModelShape, param: str
) -> dict[Point, npt.NDArray[Any]]:
    """Return the rows of the only tensor by the points of ``at``; a single row is that of all."""
    if len(tensors) > 1:
        raise _invalid(
            f"`at` says where one tensor belongs, and here are {len(tensors)}; name each by its layer, and "
            "leave `at` out.",
            param,
        )
    points = points_of(at, shape.num_layers, "at")
    (tensor,) = tensors.values()
    if tensor.ndim <= 1 or tensor.shape[0] == 1:
        return {point: tensor.reshape(-1) for point in points}
    if tensor.ndim != len(("points", "width")) or len(tensor) != len(points):
        raise ApiError(
            ErrorCode.WRONG_WIDTH,
            f"`at` names {len(points)} points, so their tensor must be [width] or [{len(points)}, width]; "
            f"got {list(tensor.shape)}.",
            param,
        )
    return dict(zip(points, tensor, strict=True))


def points_of(at: str | Sequence[str], num_layers: int, param: str) -> list[Point]:
    """Return the points of layers that ``at`` names, in its order.

    Raises:
        ApiError: ``unknown_point`` (also for points of the whole model), ``unknown_layer``, or
            ``invalid_value`` (a point is named twice).
    """
    points: dict[Point, None] = {}
    for text in [at] if isinstance(at, str) else at:
        for point in PointPattern.parse(text, param).resolve(num_layers, param):
            if point.layer < 0:
                raise ApiError(
                    ErrorCode.UNKNOWN_POINT, f"A vector has rows for layers, and {point} is of none.", param
                )
            if point in points:
                raise ApiError(
                    ErrorCode.INVALID_VALUE, f"A place may be named once; {point} is named twice.", param
                )
            points[point] = None
    return list(points)


def _row(tensor: npt.NDArray[Any], point: Point, width: int, param: str) -> Floats:
    """Return a tensor as the row of a point; raises ApiError for a wrong width, or infinite numbers."""
    if tensor.size != width or max(tensor.shape, default=0) != width:
        raise ApiError(
            ErrorCode.WRONG_WIDTH,
            f"A row for {point} must have {width} numbers, got a tensor of shape {list(tensor.shape)[:8]}. "
            "GET /v1/capabilities lists the widths.",
            param,
        )
    with np.errstate(over="ignore", invalid="ignore"):
        row = tensor.reshape(width).astype(np.float32)
    if not np.isfinite(row).all():
        raise ApiError(
            ErrorCode.NOT_FINITE,
            f"Every number must be finite in float32; the row for {point} has others.",
            param,
        )
    return row


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_VECTOR_FILE, message, param)
