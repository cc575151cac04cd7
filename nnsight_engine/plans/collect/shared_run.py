"""Results of a run's steps, for all its requests together, in the scheduler's process.

A request's part is extracted when an output is sent for it, or when the run ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nnsight_engine.plans.records import RunGroup, RunOpening, RunStep

HeldParts = Callable[[str, int], list[bytes] | None]
"""Returns a request's reduction so far, by request id and index of the operation; None if there is none."""


class RunRows(Protocol):
    def add(self, parts: list[bytes]) -> None: ...

    def of(self, row: int, since: int) -> list[bytes]:
        """Return one member's values of the steps from ``since`` on, or their reduction."""


class EveryStep:
    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._steps: list[list[bytes]] = []

    def add(self, parts: list[bytes]) -> None:
        self._steps.append(parts)

    def of(self, row: int, since: int) -> list[bytes]:
        columns = zip(*self._steps[since:], strict=True)
        return [b"".join(_row(part, row, self._num_rows) for part in column) for column in columns]


class LastStep:
    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._parts: list[bytes] = []

    def add(self, parts: list[bytes]) -> None:
        self._parts = parts

    def of(self, row: int, since: int) -> list[bytes]:
        del since
        return [_row(part, row, self._num_rows) for part in self._parts]


class Totals:
    """Sums in float32, in the order of each member alone; ``held`` are the sums before the run."""

    def __init__(self, held: list[list[bytes] | None]) -> None:
        self._held = held
        self._totals: list[npt.NDArray[np.float32]] = []

    def add(self, parts: list[bytes]) -> None:
        rows = [np.frombuffer(part, np.float32).reshape(len(self._held), -1) for part in parts]
        if not self._totals:
            self._totals = [part.copy() for part in rows]
            for row, held in enumerate(self._held):
                for index, own in enumerate(held or ()):
                    self._totals[index][row] += np.frombuffer(own, np.float32)
            return
        for total, part in zip(self._totals, rows, strict=True):
            np.add(total, part, out=total)

    def of(self, row: int, since: int) -> list[bytes]:
        del since
        return [total[row].tobytes() for total in self._totals]


@dataclasses.dataclass(frozen=True, slots=True)
class RunSlot:
    op: int
    rows: RunRows
    row: int


class SharedRun:
    """A run in progress; ``held`` returns the value of a member's reduction before the run."""

    def __init__(self, opening: RunOpening, held: HeldParts) -> None:
        self.num_steps = 0
        self.point_s = 0.0
        self.slots: dict[str, list[RunSlot]] = {request_id: [] for request_id in opening.request_ids}
        self._groups: list[RunRows] = []
        for group in opening.groups:
            rows = _rows(group, held)
            self._groups.append(rows)
            for row, (request_id, op) in enumerate(group.members):
                self.slots[request_id].append(RunSlot(op, rows, row))

    def add(self, step: RunStep) -> None:
        self.num_steps, self.point_s = step.num_steps, step.point_s
        for rows, parts in zip(self._groups, step.parts, strict=True):
            rows.add(parts)


def _rows(group: RunGroup, held: HeldParts) -> RunRows:
    match group.reduce:
        case "mean":
            return Totals([held(request_id, op) for request_id, op in group.members])
        case "last":
            return LastStep(len(group.members))
        case _:
            return EveryStep(len(group.members))


def _row(part: bytes, row: int, num_rows: int) -> bytes:
    size = len(part) // num_rows
    return part[row * size : (row + 1) * size]
