"""Scores and states of tests by position, on the device, for tests that depend on earlier positions.

Each test of a live request has a slot: a row of three tables with a column for each position. So a step that
is computed again, in whole or in part, writes what it wrote before. Slots of one size share tables, for
kernels over many requests.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

SLOT_BYTES: Final = 9
"""Bytes of a slot for each position."""

_SMALLEST: Final = 256
_FEWEST: Final = 4


class SlotTable:
    """Slots of one size. Its memory stays where it is: instructions of steps have addresses of it.

    Args:
        size: Number of positions of a slot.
        num_slots: Number of slots.
        device: The model's device.

    Attributes:
        scores: Scores times the test's sign, ``[slots, size]``, float32.
        reduced: Largest score, or sum of scores, of the prompt up to a position, ``[slots, size]``, float32.
        held: Whether the test holds, ``[slots, size]``.
    """

    def __init__(self, size: int, num_slots: int, device: torch.device) -> None:
        self.size = size
        self.scores = torch.zeros(num_slots, size, device=device)
        self.reduced = torch.zeros(num_slots, size, device=device)
        self.held = torch.zeros(num_slots, size, dtype=torch.bool, device=device)
        self._free = list(reversed(range(num_slots)))

    def acquire(self) -> int | None:
        """Return the row of a free slot; None if there is none."""
        return self._free.pop() if self._free else None

    def release(self, row: int) -> None:
        """Free a slot."""
        self._free.append(row)

    @property
    def num_used(self) -> int:
        """Number of slots in use."""
        return len(self.held) - len(self._free)


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A row of a table."""

    table: SlotTable
    row: int


class ScoreSlots:
    """All slots of a worker.

    Args:
        device: The model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: list[SlotTable] = []

    def __len__(self) -> int:
        """Return the number of slots in use."""
        return sum(table.num_used for table in self._tables)

    def acquire(self, num_positions: int) -> Slot:
        """Return a slot for a request of at most so many positions."""
        size = slot_size(num_positions)
        alike = [table for table in self._tables if table.size == size]
        for table in alike:
            row = table.acquire()
            if row is not None:
                return Slot(table, row)
        # As many as there are already, so that kernels over all tests are few.
        table = SlotTable(size, max(_FEWEST, sum(len(one.held) for one in alike)), self._device)
        self._tables.append(table)
        row = table.acquire()
        if row is None:
            raise RuntimeError("a new table has no slots")
        return Slot(table, row)

    def release(self, slot: Slot) -> None:
        """Free a slot; a table without used slots is freed."""
        slot.table.release(slot.row)
        if not slot.table.num_used:
            self._tables.remove(slot.table)


def slot_size(num_positions: int) -> int:
    """Return the number of positions of the slot that a request gets: the next power of two."""
    return max(_SMALLEST, 1 << (num_positions - 1).bit_length())
