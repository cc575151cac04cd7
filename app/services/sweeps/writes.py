"""The operation of each cell of a sweep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from api_schemas.interventions import Operation
from api_schemas.operations import Ablate, Capture, Feature, FeatureChange, Patch, Steer, Where
from api_schemas.sweeps import AblateSweep, AnySweep, FeatureSweep, PatchSweep, SteerSweep
from api_schemas.tensors import TensorInput, TensorObject
from app.services.sweeps.grid import Grid
from app.services.sweeps.prompts import SweptPrompt
from nnsight_engine.core.dtypes import floats_from_bytes

ROWS: Final = "rows"
"""The beginning of the names of the captures of what patches write."""
_ITEM_BYTES: Final = 4
_CAPTURED_BYTES: Final = 16 * 2**20
"""Captured by one request, since its answer is decoded in one piece."""
_CONTROL: Final = "control"


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A cell by its number and, for each axis, the index of its label."""

    number: int
    at: Mapping[str, int]
    is_control: bool = False


class CellWrites:
    """Makes the operations of cells, once the names in the ones that they differ from are resolved.

    Attributes:
        named: Operations of which cells differ in numbers and positions only.
    """

    def __init__(self, wanted: AnySweep, grid: Grid) -> None:
        self._wanted = wanted
        self._grid = grid
        self.named: dict[Hashable, Any] = {}
        if isinstance(wanted, SteerSweep):
            for point in grid.points.values():
                self.named[point] = Steer(at=point, vector=wanted.vector, mode=wanted.mode)
        elif isinstance(wanted, FeatureSweep):
            for index, feature in enumerate(wanted.features):
                change = FeatureChange(feature=feature, mode=wanted.mode, value=wanted.values[0])
                self.named[index] = Feature(dictionary=wanted.dictionary, changes=[change])

    def resolve(self, found: Sequence[Operation]) -> None:
        """Take the operations of ``named`` with values in place of names, in the same order."""
        self.named = dict(zip(self.named, found, strict=True))

    def of(self, cell: Cell, prompt: SweptPrompt) -> Operation:
        wanted, at = self._wanted, cell.at
        where = Where() if isinstance(wanted, PatchSweep) else wanted.where
        if "position" in at:
            label = self._grid.axes["position"][at["position"]]
            where = Where(positions=[int(label) % len(prompt.changed)])
        if isinstance(wanted, FeatureSweep):
            feature: Feature = self.named[at["feature"]]
            change = feature.changes[0].model_copy(update={"value": wanted.values[at["value"]]})
            return feature.model_copy(update={"where": where, "changes": [change]})
        point = self._grid.point_of(at)
        if isinstance(wanted, SteerSweep):
            steer: Steer = self._control(point, wanted.seed) if cell.is_control else self.named[point]
            scale = wanted.strengths[at["strength"]]
            return steer.model_copy(update={"where": where, "scale": scale})
        units = self._units(point, at)
        if isinstance(wanted, AblateSweep):
            return Ablate(at=point, method=wanted.ablation, units=units, where=where)
        positions = where.positions or list(range(len(prompt.changed)))
        values = np.stack([prompt.rows[point][position] for position in positions])
        if units is not None:
            own = np.stack([prompt.own_rows[point][position] for position in positions])
            own[:, units] = values[:, units]
            values = own
        tensor = TensorObject.from_bytes("float32", [*values.shape], values.tobytes(), with_text=False)
        # Not validated, which would decode the text.
        return Patch.model_construct(at=point, values=tensor, where=Where(positions=positions))

    def captures(self, prompt: SweptPrompt, *, is_changed: bool) -> list[list[Operation]]:
        """Return what one of a prompt's runs without interventions captures, for each of its requests."""
        if not isinstance(self._wanted, PatchSweep) or (is_changed and "head" not in self._grid.axes):
            return [[]]
        sizes = {point: math.prod(shape) * _ITEM_BYTES for point, shape in self._grid.shapes.items()}
        positions, step = self._positions(prompt), max(1, _CAPTURED_BYTES // max(sizes.values()))
        requests: list[list[Operation]] = []
        for start in range(0, len(positions), step):
            where = Where(positions=positions[start : start + step])
            requests += [
                [
                    Capture(at=points, where=where, dtype="float32", name=f"{ROWS}{index}")
                    for index, points in at.items()
                ]
                for at in self._groups(sizes, _CAPTURED_BYTES // min(step, len(positions)))
            ]
        return requests

    def _groups(self, sizes: Mapping[str, int], most: int) -> list[dict[int, list[str]]]:
        """Return groups of points by pattern, since one operation may name a place by one name only."""
        groups: list[dict[int, list[str]]] = []
        left = 0
        for (index, _), point in self._grid.points.items():
            if not groups or sizes[point] > left:
                groups.append({})
                left = most
            groups[-1].setdefault(index, []).append(point)
            left -= sizes[point]
        return groups

    def bytes_of(self, cell: Cell, prompt: SweptPrompt) -> int:
        if not isinstance(self._wanted, PatchSweep):
            return 0
        num_rows = 1 if "position" in cell.at else len(prompt.changed)
        return num_rows * math.prod(self._grid.shapes[self._grid.point_of(cell.at)]) * _ITEM_BYTES

    def num_bytes(self, prompts: Sequence[SweptPrompt]) -> int:
        """Return the bytes of all that the prompts' runs capture."""
        if not isinstance(self._wanted, PatchSweep):
            return 0
        row = sum(map(math.prod, self._grid.shapes.values())) * _ITEM_BYTES
        num_runs = 2 if "head" in self._grid.axes else 1
        return num_runs * row * sum(len(self._positions(prompt)) for prompt in prompts)

    def _positions(self, prompt: SweptPrompt) -> list[int]:
        named = self._grid.axes.get("position")
        if named is None:
            return list(range(len(prompt.changed)))
        return sorted({int(position) % len(prompt.changed) for position in named})

    def _units(self, point: str, at: Mapping[str, int]) -> list[int] | None:
        if "head" not in at:
            return None
        head, width = int(self._grid.axes["head"][at["head"]]), self._grid.shapes[point][1]
        return list(range(head * width, (head + 1) * width))

    def _control(self, point: str, seed: int) -> Steer:
        key = point, _CONTROL
        if key not in self.named:
            steer: Steer = self.named[point]
            order = list(self._grid.points.values()).index(point)
            self.named[key] = steer.model_copy(update={"vector": random_like(steer.vector, (seed, order))})
        return self.named[key]  # type: ignore[no-any-return]  # a Steer


def random_like(vector: TensorInput | None, seed: tuple[int, ...]) -> TensorObject:
    """Return random directions, row by row as long as the vector's."""
    if isinstance(vector, TensorObject):
        rows = floats_from_bytes(vector.dtype, vector.raw).reshape(vector.shape).astype(np.float64)
    else:
        rows = np.asarray(vector, np.float64)
    rows = np.atleast_1d(rows)  # other shapes are refused by the engine
    found = np.random.default_rng(seed).standard_normal(rows.shape)
    with np.errstate(all="ignore"):
        found *= np.linalg.norm(rows, axis=-1, keepdims=True) / np.linalg.norm(found, axis=-1, keepdims=True)
        found = found.astype("<f4")
    return TensorObject.from_bytes("float32", [*found.shape], found.tobytes())
