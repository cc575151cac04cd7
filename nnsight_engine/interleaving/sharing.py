"""Variables between invokes: each sees what those before it assigned, as if they ran one after the other.

Invokes are written one after the other but run side by side, so one cell for all would let a later invoke
change a variable under an earlier one's hands. Each invoke therefore has cells of its own, which start with
the values of the surrounding code at the place where it stands (in a loop, of that turn). When an invoke has
assigned a variable and hands control over, the value is passed on:

- to every later invoke that has not assigned the variable itself;
- to an earlier one only if it has no value for it at all, as after a barrier.

The surrounding code gets, in the end, what the last invoke in order of definition assigned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CellType
from typing import Any, Protocol

from nnsight_engine.core.cells import UNBOUND, content


class Sharer(Protocol):
    """An invoke, as far as its variables are concerned.

    Attributes:
        outer: The cells of the surrounding code, by name; the same cell means the same variable.
        own: The invoke's cells, by name.
        stored: The names it may assign.
    """

    @property
    def outer(self) -> Mapping[str, CellType]: ...  # noqa: D102 - see the class

    @property
    def own(self) -> Mapping[str, CellType]: ...  # noqa: D102

    @property
    def stored(self) -> Sequence[str]: ...  # noqa: D102


class _Reader:
    """An invoke's cell for a variable that another one assigns."""

    __slots__ = ("cell", "order", "passed")

    def __init__(self, cell: CellType, order: int) -> None:
        self.cell = cell
        self.order = order
        self.passed = content(cell)

    def take(self, value: Any, order: int) -> None:
        """Take a value from the invoke at ``order``, unless this one has its own."""
        now = content(self.cell)
        if now is UNBOUND or (order < self.order and now is self.passed):
            self.cell.cell_contents = self.passed = value


def publishers(sharers: Sequence[Sharer]) -> list[Callable[[], None] | None]:
    """Return, for each invoke, what passes its assignments on; None where nobody would want them."""
    readers: dict[int, list[_Reader]] = {
        id(sharer.outer[name]): [] for sharer in sharers for name in sharer.stored
    }
    if not readers:
        return [None] * len(sharers)
    for order, sharer in enumerate(sharers):
        for name, cell in sharer.outer.items():
            if id(cell) in readers:
                readers[id(cell)].append(_Reader(sharer.own[name], order))
    return [_publisher(order, sharer, readers) for order, sharer in enumerate(sharers)]


def _publisher(order: int, sharer: Sharer, readers: dict[int, list[_Reader]]) -> Callable[[], None] | None:
    watched = []
    for name in sharer.stored:
        known = readers.get(id(sharer.outer[name]), ())
        others = [reader for reader in known if reader.order != order]
        if others:
            own = sharer.own[name]
            watched.append([own, content(own), others])
    if not watched:
        return None

    def publish() -> None:
        for entry in watched:
            own, before, others = entry
            value = content(own)
            if value is not before and value is not UNBOUND:
                entry[1] = value
                for reader in others:
                    reader.take(value, order)

    return publish


def bring_home(sharer: Sharer) -> None:
    """Give the surrounding code what an invoke assigned; called for all, in order of definition."""
    for name in sharer.stored:
        value = content(sharer.own[name])
        if value is not UNBOUND:
            sharer.outer[name].cell_contents = value
