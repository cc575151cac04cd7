"""Closure cells that hold the variables a block shares with the code around it; a cell may be unbound."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import CellType, FunctionType
from typing import Any, Final

UNBOUND: Final = object()
"""The result of ``content`` for a variable that was never assigned."""


def content(cell: CellType) -> Any:
    """Return the value of a cell, or ``UNBOUND``."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNBOUND


def copied(cells: Mapping[str, CellType]) -> dict[str, CellType]:
    return {name: _copied(cell) for name, cell in cells.items()}


_TOTAL: Final = 0
"""The key of the total; never the ``id`` of a cell."""


class Assignments:
    """The variables of a block, with a count of assignments to each (see ``tracing.counted_stores``)."""

    __slots__ = ("_counts", "cells")

    def __init__(self, cells: MutableMapping[str, CellType], counts: dict[int, int] | None = None) -> None:
        """Start counting at zero, or continue with the counts of the code around the block."""
        self.cells = cells
        self._counts: dict[int, int] = {} if counts is None else counts

    def inside(self, cells: MutableMapping[str, CellType]) -> Assignments:
        return Assignments(cells, self._counts)

    def lent(self, capture: FunctionType) -> Assignments:
        """Return the assignments of a function defined here; ``capture``, never called, holds its cells."""
        cells = dict(zip(capture.__code__.co_freevars, capture.__closure__ or (), strict=True))
        return Assignments({**self.cells, **cells}, self._counts)

    @property
    def total(self) -> int:
        return self._counts.get(_TOTAL, 0)

    def __getitem__(self, name: str) -> int:
        """Return the number of assignments and deletions of a variable."""
        cell = self.cells.get(name)
        return 0 if cell is None else self.count_of(cell)

    def count_of(self, cell: CellType) -> int:
        return self._counts.get(id(cell), 0)

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value
        self.count(name)

    def __delitem__(self, name: str) -> None:
        cell = self.cells[name]
        if content(cell) is UNBOUND:
            raise NameError(f"name {name!r} is not defined", name=name)
        del cell.cell_contents
        self.count(name)

    def assign(self, name: str, value: Any) -> Any:
        self[name] = value
        return value

    def count(self, *names: str) -> bool:
        """Count stores made to the cells directly; return True, so that it can stand in a pattern's guard."""
        counts = self._counts
        for name in names:
            key = id(self.cells[name])
            counts[key] = counts.get(key, 0) + 1
        counts[_TOTAL] = counts.get(_TOTAL, 0) + 1
        return True


def _copied(cell: CellType) -> CellType:
    try:
        return CellType(cell.cell_contents)
    except ValueError:
        return CellType()
