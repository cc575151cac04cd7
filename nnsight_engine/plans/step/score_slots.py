"""Scores and states of tests by position, on the device, for tests that depend on earlier positions.

Each test of a live request has a slot: a row of three tables with a column for each position. So a step that
is computed again, in whole or in part, writes what it wrote before. Slots of one size share their tables, for
kernels over many requests.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

SLOT_BYTES: Final = 9
"""Bytes of a slot for each position."""

_SMALLEST: Final = 256


class SlotTable:
    """The slots of one size.

    Args:
        size: Number of positions of a slot.
        device: The model's device.

    Attributes:
        scores: Scores times the test's sign, ``[slots, size]``, float32.
        reduced: Largest score, or sum of scores, of the prompt up to a position, ``[slots, size]``, float32.
        held: Whether the test holds, ``[slots, size]``.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.scores = torch.zeros(0, size, device=device)
        self.reduced = torch.zeros(0, size, device=device)
        self.held = torch.zeros(0, size, dtype=torch.bool, device=device)
        self._free: list[int] = []

    def acquire(self) -> int:
        """Return the row of a free slot."""
        if not self._free:
            used = len(self.held)
            new = max(4, used)
            grown = [
                torch.cat([table, table.new_zeros(new, self.size)])
                for table in (self.scores, self.reduced, self.held)
            ]
            self.scores, self.reduced, self.held = grown
            self._free.extend(reversed(range(used, used + new)))
        return self._free.pop()

    def release(self, row: int) -> None:
        """Free a slot."""
        self._free.append(row)

    @property
    def is_unused(self) -> bool:
        """Whether no slot is in use."""
        return len(self._free) == len(self.held)


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
        self._tables: dict[int, SlotTable] = {}

    def __len__(self) -> int:
        """Return the number of slots in use."""
        return sum(len(table.held) - len(table._free) for table in self._tables.values())  # noqa: SLF001 - ours

    def acquire(self, num_positions: int) -> Slot:
        """Return a slot for a request of at most so many positions."""
        size = slot_size(num_positions)
        table = self._tables.get(size)
        if table is None:
            table = self._tables[size] = SlotTable(size, self._device)
        return Slot(table, table.acquire())

    def release(self, slot: Slot) -> None:
        """Free a slot; a table without used slots is freed."""
        slot.table.release(slot.row)
        if slot.table.is_unused:
            self._tables.pop(slot.table.size, None)


def slot_size(num_positions: int) -> int:
    """Return the number of positions of the slot that a request gets: the next power of two."""
    return max(_SMALLEST, 1 << (num_positions - 1).bit_length())
