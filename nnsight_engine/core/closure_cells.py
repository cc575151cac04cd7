"""Cells, which hold the variables that a block shares, and may hold nothing yet.

Blocks are compiled onto them, invokes get copies of them, and saved values are read from them. Where
it matters whether a block has assigned a variable, and not only what it holds, it stores through
``Assignments``.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import CellType, FunctionType
from typing import Any, Final

UNBOUND: Final = object()
"""What ``content`` gives for a variable that was never assigned."""


def content(cell: CellType) -> Any:
    """Return what a cell holds, or ``UNBOUND``."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNBOUND


def copied(cells: Mapping[str, CellType]) -> dict[str, CellType]:
    """Return cells of their own, by the same names, holding what these hold."""
    try:
        return {name: CellType(cell.cell_contents) for name, cell in cells.items()}
    except ValueError:  # one of them is unbound
        return {name: _copied(cell) for name, cell in cells.items()}


_TOTAL: Final = 0
"""A key that is no cell's identity."""


class Assignments:
    """A block's variables, which its code assigns through this, see ``tracing.counted_stores``.

    Attributes:
        cells: The variables, by name.
    """

    __slots__ = ("_counts", "cells")

    def __init__(self, cells: MutableMapping[str, CellType], counts: dict[int, int] | None = None) -> None:
        """Count from nothing, or on with the counts of the code around the block."""
        self.cells = cells
        self._counts: dict[int, int] = {} if counts is None else counts

    def inside(self, cells: MutableMapping[str, CellType]) -> Assignments:
        """Return the same for a block inside this one, which has cells of this one and may have others."""
        return Assignments(cells, self._counts)

    def lent(self, capture: FunctionType) -> Assignments:
        """Return the same for a function defined in this block.

        Args:
            capture: Is not called; it captures the cells of those of the function's own variables that are to
                be counted.
        """
        own = dict(zip(capture.__code__.co_freevars, capture.__closure__ or (), strict=True))
        return Assignments({**self.cells, **own}, self._counts)

    @property
    def total(self) -> int:
        """How often anything has been assigned or deleted."""
        return self._counts.get(_TOTAL, 0)

    def __getitem__(self, name: str) -> int:
        """Return how often a variable has been assigned or deleted."""
        cell = self.cells.get(name)
        return 0 if cell is None else self.of(cell)

    def of(self, cell: CellType) -> int:
        """Return how often the variable in a cell has been assigned or deleted."""
        return self._counts.get(id(cell), 0)

    def __setitem__(self, name: str, value: Any) -> None:
        """Assign."""
        self.cells[name].cell_contents = value
        self.count(name)

    def __delitem__(self, name: str) -> None:
        """Delete.

        Raises:
            NameError: There is nothing.
        """
        cell = self.cells[name]
        if content(cell) is UNBOUND:
            raise NameError(f"name {name!r} is not defined", name=name)
        del cell.cell_contents
        self.count(name)

    def assign(self, name: str, value: Any) -> Any:
        """Assign, and return the value."""
        self[name] = value
        return value

    def count(self, *names: str) -> bool:
        """Count what has been stored to the cells themselves; true, so that a pattern's guard may ask."""
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
