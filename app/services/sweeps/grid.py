"""The axes of a sweep, resolved against the model and the lengths of its prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.points import PointPattern, point_name
from api_schemas.server import Capabilities, PointCapability
from api_schemas.sweeps import (
    LAYER,
    AblateSweep,
    AnySweep,
    FeatureSweep,
    PatchSweep,
    ProbeMetric,
    SteerSweep,
)
from app.catalog.training import layers_of

Label = int | float | str

_SHOWN_IF_SEVERAL: Final = {"prompt", "point"}
_AFTER: Final = {"norm.output", "logits", "samples"}
"""Points behind the residual stream, from which the metrics read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """The axes of a sweep with their labels, all of them; cells are in the order of the last axis first."""

    axes: dict[str, list[Label]]
    points: dict[tuple[int, int], str]
    shapes: dict[str, list[int]]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.axes.values()))

    @property
    def num_cells(self) -> int:
        return math.prod(self.shape)

    @property
    def dims(self) -> list[str]:
        return [name for name, labels in self.axes.items() if self._is_shown(name, labels)]

    def cells(self) -> Iterator[dict[str, int]]:
        for index in np.ndindex(*self.shape):
            yield dict(zip(self.axes, index, strict=True))

    def point_of(self, cell: Mapping[str, int]) -> str:
        return self.points[cell["point"], cell.get("layer", 0)]

    def _is_shown(self, name: str, labels: list[Label]) -> bool:
        return name not in _SHOWN_IF_SEVERAL or len(labels) > 1


def grid_of(wanted: AnySweep, capabilities: Capabilities, lengths: Sequence[int]) -> Grid:
    """Return the axes of a sweep over prompts of these lengths; raises ApiError for what does not exist."""
    axes: dict[str, list[Label]] = {"prompt": list(range(len(lengths)))}
    points: dict[tuple[int, int], str] = {}
    shapes: dict[str, list[int]] = {}
    if isinstance(wanted.metric, ProbeMetric):
        _check_one_point(wanted.metric.at, capabilities.sizes.num_layers, "metric.at")
    if not isinstance(wanted, FeatureSweep):
        layers = _layers(wanted, capabilities)
        axes["point"] = list(wanted.points)
        if layers is not None:
            axes["layer"] = [*layers]
        for index, name in enumerate(wanted.points):
            for at, layer in enumerate(layers or [0]):
                given = name.replace(LAYER, str(layer))
                point, known = _known(given, wanted.method, capabilities, f"points.{index}")
                points[index, at], shapes[point] = point, known.shape
    if isinstance(wanted, PatchSweep | AblateSweep) and wanted.heads is not None:
        axes["head"] = _heads(wanted.heads, shapes)
    if wanted.positions is not None:
        axes["position"] = _positions(wanted.positions, lengths)
    if isinstance(wanted, SteerSweep):
        axes["strength"] = [*wanted.strengths]
    if isinstance(wanted, FeatureSweep):
        axes |= {"feature": [*wanted.features], "value": [*wanted.values]}
    return Grid(axes, points, shapes)


def _check_one_point(point: str, num_layers: int, param: str) -> None:
    found = PointPattern.parse(point, param).resolve(num_layers, param)
    if len(found) != 1:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A metric is read at one point, such as layers.3.output; {point!r} is {len(found)} points.",
            param,
        )


def _layers(wanted: PatchSweep | AblateSweep | SteerSweep, capabilities: Capabilities) -> list[int] | None:
    """Return None for points that are in no layer."""
    without = [name for name in wanted.points if LAYER not in name]
    if not without:
        return layers_of(wanted.layers, capabilities.sizes.num_layers)
    if len(without) < len(wanted.points) or "layers" in wanted.model_fields_set:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"With an axis of layers every point has {LAYER}, such as layers.{LAYER}.output; got "
            f"{without[0]!r}.",
            "points",
        )
    return None


def _known(point: str, method: str, capabilities: Capabilities, param: str) -> tuple[str, PointCapability]:
    """Return the one name that the point has in results, and what the model says of it."""
    pattern = PointPattern.parse(point, param)
    found = pattern.resolve(capabilities.sizes.num_layers, param)
    name = point_name(pattern.leaf)
    known = [
        one
        for one in capabilities.points
        if one.name == name and (one.layers is None or found[0].layer in one.layers)
    ]
    if len(found) != 1 or not known:
        raise ApiError(
            ErrorCode.UNKNOWN_POINT,
            f"This model has no single point {point!r}; GET /v1/capabilities lists its points.",
            param,
        )
    if method not in known[0].operations or name in _AFTER or name.startswith("vision."):
        raise ApiError(
            ErrorCode.UNSUPPORTED_AT_POINT,
            f"A sweep can {method} at points of the layers that GET /v1/capabilities lists with this "
            f"operation, and at embed.output; got {point!r}.",
            param,
        )
    return str(found[0]), known[0]


def _heads(wanted: list[int] | str, shapes: Mapping[str, list[int]]) -> list[Label]:
    flat = next((point for point, shape in shapes.items() if len(shape) != len(("head", "width"))), None)
    if flat is not None:
        raise ApiError(ErrorCode.UNSUPPORTED_AT_POINT, f"{flat} has no axis of heads.", "heads")
    most = min(shape[0] for shape in shapes.values())
    if isinstance(wanted, str):
        return list(range(most))
    beyond = next((index for index, head in enumerate(wanted) if head >= most), None)
    if beyond is not None:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A head here lies between 0 and {most - 1}, got {wanted[beyond]}.",
            f"heads.{beyond}",
        )
    return [*wanted]


def _positions(wanted: list[int] | str, lengths: Sequence[int]) -> list[Label]:
    """Return absolute positions if all prompts have as many tokens, or else those that were given."""
    is_one_length = len(set(lengths)) == 1
    if wanted == "all" and not is_one_length:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            "`all` positions are an axis for prompts with the same number of tokens, and these have "
            f"{', '.join(map(str, sorted(set(lengths))))}; name positions.",
            "positions",
        )
    if isinstance(wanted, str):
        wanted = list(range(lengths[0])) if wanted == "all" else [-1]
    for index, position in enumerate(wanted):
        if not all(-length <= position < length for length in lengths):
            raise ApiError(
                ErrorCode.POSITION_OUT_OF_RANGE,
                f"A position of these prompts lies between {-min(lengths)} and {min(lengths) - 1}, got "
                f"{position}.",
                f"positions.{index}",
            )
    if not is_one_length:
        return [*wanted]
    absolute = [position % lengths[0] for position in wanted]
    if len(set(absolute)) < len(absolute):
        raise ApiError(ErrorCode.INVALID_VALUE, "A position may be named once.", "positions")
    return [*absolute]
