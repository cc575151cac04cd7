"""Scores and states of tests by position, on the device, for tests that depend on earlier positions.

A slot is a row of three tables with a column for each position, so that a step that is computed again, in
whole or in part, writes what it wrote before.
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

    ``scores`` are times the test's sign; ``reduced`` is the largest score, or the sum, of the prompt so far.
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
        self._free.append(row)

    @property
    def num_used(self) -> int:
        return len(self.held) - len(self._free)


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    table: SlotTable
    row: int


class ScoreSlots:
    """All slots of a worker; those of one size share tables, for kernels over many requests."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: list[SlotTable] = []

    def __len__(self) -> int:
        return sum(table.num_used for table in self._tables)

    def acquire(self, num_positions: int) -> Slot:
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
