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

    def __init__(self, sweep: AnySweep, grid: Grid) -> None:
        self._sweep = sweep
        self._grid = grid
        self.named: dict[Hashable, Any] = {}
        if isinstance(sweep, SteerSweep):
            for point in grid.points.values():
                self.named[point] = Steer(at=point, vector=sweep.vector, mode=sweep.mode)
        elif isinstance(sweep, FeatureSweep):
            for index, feature in enumerate(sweep.features):
                change = FeatureChange(feature=feature, mode=sweep.mode, value=sweep.values[0])
                self.named[index] = Feature(dictionary=sweep.dictionary, changes=[change])

    def resolve(self, resolved: Sequence[Operation]) -> None:
        """Take the operations of ``named`` with values in place of names, in the same order."""
        self.named = dict(zip(self.named, resolved, strict=True))

    def of(self, cell: Cell, prompt: SweptPrompt) -> Operation:
        """Return the operation of a cell: the named one with its numbers, or one with the values of a run."""
        sweep, at = self._sweep, cell.at
        where = Where() if isinstance(sweep, PatchSweep) else sweep.where
        if "position" in at:
            label = self._grid.axes["position"][at["position"]]
            where = Where(positions=[int(label) % len(prompt.changed)])
        if isinstance(sweep, FeatureSweep):
            feature: Feature = self.named[at["feature"]]
            change = feature.changes[0].model_copy(update={"value": sweep.values[at["value"]]})
            return feature.model_copy(update={"where": where, "changes": [change]})
        point = self._grid.point_of(at)
        if isinstance(sweep, SteerSweep):
            steer: Steer = self._control(point, sweep.seed) if cell.is_control else self.named[point]
            scale = sweep.strengths[at["strength"]]
            return steer.model_copy(update={"where": where, "scale": scale})
        units = self._units(point, at)
        if isinstance(sweep, AblateSweep):
            return Ablate(at=point, method=sweep.ablation, units=units, where=where)
        positions = where.positions or list(range(len(prompt.changed)))
        values = np.stack([prompt.rows[point][position] for position in positions])
        if units is not None:
            own_values = np.stack([prompt.own_rows[point][position] for position in positions])
            own_values[:, units] = values[:, units]
            values = own_values
        tensor = TensorObject.from_bytes("float32", [*values.shape], values.tobytes())
        return Patch(at=point, values=tensor, where=Where(positions=positions))

    def captures(self, prompt: SweptPrompt, *, is_changed: bool) -> list[Operation]:
        """Return what one of a prompt's runs without interventions has to capture for the cells."""
        if not isinstance(self._sweep, PatchSweep) or (is_changed and "head" not in self._grid.axes):
            return []
        where, captures = Where(positions=self._positions(prompt)), list[Operation]()
        for index, _ in enumerate(self._sweep.points):  # one operation may name a place by one name only
            points = [point for (number, _), point in self._grid.points.items() if number == index]
            captures.append(Capture(at=points, where=where, dtype="float32", name=f"{ROWS}{index}"))
        return captures

    def bytes_of(self, cell: Cell, prompt: SweptPrompt) -> int:
        """Return the bytes of the values that a cell's operation holds."""
        if not isinstance(self._sweep, PatchSweep):
            return 0
        num_rows = 1 if "position" in cell.at else len(prompt.changed)
        return num_rows * math.prod(self._grid.shapes[self._grid.point_of(cell.at)]) * _ITEM_BYTES

    def num_bytes(self, prompts: Sequence[SweptPrompt]) -> int:
        """Return the bytes of all that the prompts' runs capture."""
        if not isinstance(self._sweep, PatchSweep):
            return 0
        row = sum(map(math.prod, self._grid.shapes.values())) * _ITEM_BYTES
        num_runs = 2 if "head" in self._grid.axes else 1
        return num_runs * row * sum(len(self._positions(prompt)) for prompt in prompts)

    def _positions(self, prompt: SweptPrompt) -> list[int]:
        """Return the absolute positions of a prompt that cells change, ascending."""
        labels = self._grid.axes.get("position")
        if labels is None:
            return list(range(len(prompt.changed)))
        return sorted({int(position) % len(prompt.changed) for position in labels})

    def _units(self, point: str, at: Mapping[str, int]) -> list[int] | None:
        """Return the columns of a cell's head in the point's value; None without an axis of heads."""
        if "head" not in at:
            return None
        head, width = int(self._grid.axes["head"][at["head"]]), self._grid.shapes[point][1]
        return list(range(head * width, (head + 1) * width))

    def _control(self, point: str, seed: int) -> Steer:
        """Return the operation of a point with random directions in place of the vector, made once."""
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
    directions = np.random.default_rng(seed).standard_normal(rows.shape)
    with np.errstate(all="ignore"):
        directions *= np.linalg.norm(rows, axis=-1, keepdims=True) / np.linalg.norm(
            directions, axis=-1, keepdims=True
        )
        directions = directions.astype("<f4")
    return TensorObject.from_bytes("float32", [*directions.shape], directions.tobytes())
