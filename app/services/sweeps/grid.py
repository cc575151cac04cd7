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
from api_schemas.sweeps import LAYER, AblateSweep, AnySweep, FeatureSweep, PatchSweep, SteerSweep
from app.catalog.training import layers_of

Label = int | float | str

_SHOWN_IF_SEVERAL: Final = {"prompt", "point"}
_AFTER: Final = {"norm.output", "logits", "samples"}
"""Points behind the residual stream, from which the metrics read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """The axes of a sweep with their labels, all of them; cells are in the order of the last axis first.

    ``points`` has the name of each by its indexes on the axes of points and of layers, ``shapes`` the shape
    of one position's value by that name.
    """

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
        """The axes of the result: those of one prompt or one point are left out."""
        return [name for name, labels in self.axes.items() if self._is_shown(name, labels)]

    def cells(self) -> Iterator[dict[str, int]]:
        """Yield each cell as the index of its label by axis."""
        for index in np.ndindex(*self.shape):
            yield dict(zip(self.axes, index, strict=True))

    def point_of(self, cell: Mapping[str, int]) -> str:
        """Return the name of the point that a cell changes."""
        return self.points[cell["point"], cell.get("layer", 0)]

    def _is_shown(self, name: str, labels: list[Label]) -> bool:
        return name not in _SHOWN_IF_SEVERAL or len(labels) > 1


def grid_of(sweep: AnySweep, capabilities: Capabilities, lengths: Sequence[int]) -> Grid:
    """Return the axes of a sweep over prompts of these lengths; raises ApiError for what does not exist."""
    axes: dict[str, list[Label]] = {"prompt": list(range(len(lengths)))}
    points: dict[tuple[int, int], str] = {}
    shapes: dict[str, list[int]] = {}
    if not isinstance(sweep, FeatureSweep):
        layers = _layers(sweep, capabilities)
        axes["point"] = list(sweep.points)
        if layers is not None:
            axes["layer"] = [*layers]
        for index, name in enumerate(sweep.points):
            for layer_index, layer in enumerate(layers or [0]):
                pattern = name.replace(LAYER, str(layer))
                point, capability = _known(pattern, sweep.method, capabilities, f"points.{index}")
                points[index, layer_index], shapes[point] = point, capability.shape
    if isinstance(sweep, PatchSweep | AblateSweep) and sweep.heads is not None:
        axes["head"] = _heads(sweep.heads, shapes)
    if sweep.positions is not None:
        axes["position"] = _positions(sweep.positions, lengths)
    if isinstance(sweep, SteerSweep):
        axes["strength"] = [*sweep.strengths]
    if isinstance(sweep, FeatureSweep):
        axes |= {"feature": [*sweep.features], "value": [*sweep.values]}
    return Grid(axes, points, shapes)


def _layers(sweep: PatchSweep | AblateSweep | SteerSweep, capabilities: Capabilities) -> list[int] | None:
    """Return the layers of the axis; None for points that are in no layer."""
    without = [name for name in sweep.points if LAYER not in name]
    if not without:
        return layers_of(sweep.layers, capabilities.sizes.num_layers)
    if len(without) < len(sweep.points) or "layers" in sweep.model_fields_set:
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
    resolved = pattern.resolve(capabilities.sizes.num_layers, param)
    name = point_name(pattern.leaf)
    known = [
        candidate
        for candidate in capabilities.points
        if candidate.name == name and (candidate.layers is None or resolved[0].layer in candidate.layers)
    ]
    if len(resolved) != 1 or not known:
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
    return str(resolved[0]), known[0]


def _heads(heads: list[int] | str, shapes: Mapping[str, list[int]]) -> list[Label]:
    """Return the heads of the axis, all for a text; raises ApiError for points without heads."""
    flat = next((point for point, shape in shapes.items() if len(shape) != len(("head", "width"))), None)
    if flat is not None:
        raise ApiError(ErrorCode.UNSUPPORTED_AT_POINT, f"{flat} has no axis of heads.", "heads")
    num_heads = min(shape[0] for shape in shapes.values())
    if isinstance(heads, str):
        return list(range(num_heads))
    beyond = next((index for index, head in enumerate(heads) if head >= num_heads), None)
    if beyond is not None:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A head here lies between 0 and {num_heads - 1}, got {heads[beyond]}.",
            f"heads.{beyond}",
        )
    return [*heads]


def _positions(positions: list[int] | str, lengths: Sequence[int]) -> list[Label]:
    """Return absolute positions if all prompts have as many tokens, or else those that were given."""
    is_one_length = len(set(lengths)) == 1
    if positions == "all" and not is_one_length:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            "`all` positions are an axis for prompts with the same number of tokens, and these have "
            f"{', '.join(map(str, sorted(set(lengths))))}; name positions.",
            "positions",
        )
    if isinstance(positions, str):
        positions = list(range(lengths[0])) if positions == "all" else [-1]
    for index, position in enumerate(positions):
        if not all(-length <= position < length for length in lengths):
            raise ApiError(
                ErrorCode.POSITION_OUT_OF_RANGE,
                f"A position of these prompts lies between {-min(lengths)} and {min(lengths) - 1}, got "
                f"{position}.",
                f"positions.{index}",
            )
    if not is_one_length:
        return [*positions]
    absolute = [position % lengths[0] for position in positions]
    if len(set(absolute)) < len(absolute):
        raise ApiError(ErrorCode.INVALID_VALUE, "A position may be named once.", "positions")
    return [*absolute]
