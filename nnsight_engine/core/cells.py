"""Cells, which hold the variables that a block shares, and may hold nothing yet.

Blocks are compiled onto them, invokes get copies of them, and saved values are read from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CellType
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


def _copied(cell: CellType) -> CellType:
    try:
        return CellType(cell.cell_contents)
    except ValueError:
        return CellType()
