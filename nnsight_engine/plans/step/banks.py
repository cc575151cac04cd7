"""What tests and features need on the model's device: scores and states by position, and dictionaries.

Tests that depend on earlier positions have a slot: a row of three tables with a column for each position, so
that a step that is computed again, in whole or in part, writes what it wrote before. The dictionaries of live
requests are read from files when first used; when memory is needed, unused ones go, the longest unused first.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import safetensors
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.features.dictionary import Dictionary, Selection
from nnsight_engine.features.weights_file import load_dictionary
from nnsight_engine.plans.request_plan import PlannedDictionary
from nnsight_engine.plans.step.host_arena import to_device

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
        """Return a slot for a request of so many positions, in a new table if all are in use."""
        size = slot_size(num_positions)
        tables_of_size = [table for table in self._tables if table.size == size]
        for table in tables_of_size:
            row = table.acquire()
            if row is not None:
                return Slot(table, row)
        # As many as there are already, so that kernels over all tests are few.
        table = SlotTable(
            size, max(_FEWEST, sum(len(existing.held) for existing in tables_of_size)), self._device
        )
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


logger = logging.getLogger(__name__)

_SELECTION_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of the selections that are kept of a dictionary while requests use it."""
_FULL: Final = "dictionary_memory_full"


FailsAnywhere = Callable[[Exception | None], bool]


def is_failure(failure: Exception | None) -> bool:
    return failure is not None


class LoadedDictionary:
    """A dictionary on the device, with the features of it that were selected last: to gather them is slow."""

    def __init__(self, dictionary: Dictionary, device: torch.device) -> None:
        self.dictionary = dictionary
        self.num_users = 0
        self._device = device
        self._selections: OrderedDict[tuple[int, ...], Selection] = OrderedDict()
        config = dictionary.config
        self._bytes_per_feature = 4 * (config.input_width + config.output_width)

    def selection(self, ids: tuple[int, ...]) -> Selection:
        """Return some features, kept for later steps; those unused the longest are dropped over a limit."""
        selection = self._selections.pop(ids, None)
        if selection is None:
            selection = Selection(self.dictionary, to_device(np.asarray(ids, np.int64), self._device))
        self._selections[ids] = selection
        while self._bytes_per_feature * sum(map(len, self._selections)) > _SELECTION_BYTES:
            self._selections.popitem(last=False)
        return selection

    def forget_selections(self) -> None:
        self._selections.clear()


class DictionaryBank:
    """Loads dictionaries, up to ``max_bytes`` of weights; a request runs on all ranks or on none."""

    def __init__(
        self, device: torch.device, max_bytes: int, fails_anywhere: FailsAnywhere = is_failure
    ) -> None:
        self._device = device
        self._max_bytes = max_bytes
        self._fails_anywhere = fails_anywhere
        self._loaded: OrderedDict[PlannedDictionary, LoadedDictionary] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return sum(planned.num_bytes for planned in self._loaded)

    @property
    def num_used(self) -> int:
        return sum(loaded.num_users > 0 for loaded in self._loaded.values())

    def acquire(self, planned: PlannedDictionary, paths: Mapping[str, str]) -> LoadedDictionary:
        """Return a dictionary, and add a user.

        Raises ``dictionary_memory_full``, or ``intervention_failed`` if its file cannot be read.
        """
        loaded = self._loaded.get(planned)
        if loaded is None:
            self._make_room(planned.num_bytes)
            loaded = self._loaded[planned] = self._load_everywhere(planned, Path(paths[planned.sha256]))
        loaded.num_users += 1
        return loaded

    def release(self, planned: PlannedDictionary) -> None:
        """Remove a user; an unused dictionary stays until its memory is needed."""
        loaded = self._loaded[planned]
        loaded.num_users -= 1
        if not loaded.num_users:
            loaded.forget_selections()
            self._loaded.move_to_end(planned)

    def _load_everywhere(self, planned: PlannedDictionary, path: Path) -> LoadedDictionary:
        """Load a dictionary, unless another rank fails to: it would compute without the request."""
        loaded: LoadedDictionary | None = None
        failure: InterventionError | None = None
        try:
            loaded = self._load(planned, path)
        except InterventionError as error:
            failure = error
        if self._fails_anywhere(failure) or loaded is None:
            raise failure or InterventionError(
                "intervention_failed", "another rank could not load the dictionary"
            )
        return loaded

    def _load(self, planned: PlannedDictionary, path: Path) -> LoadedDictionary:
        """Load a dictionary; raise InterventionError if its file or the device's memory does not allow it."""
        try:
            dictionary = load_dictionary(path, planned.config, device=str(self._device))
        except torch.OutOfMemoryError as error:
            raise InterventionError(
                _FULL,
                "the device has no memory left for the dictionary; lower the server's "
                "loaded_dictionary_bytes or gpu_memory_utilization",
            ) from error
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            logger.exception("a dictionary could not be loaded")
            raise InterventionError(
                "intervention_failed",
                "the weights of the dictionary could not be read: it was removed meanwhile, or the engine's "
                "machine lacks the folder dictionary_dir",
            ) from error
        logger.info(
            "loaded a dictionary of %d features, %d bytes", planned.config.num_features, planned.num_bytes
        )
        return LoadedDictionary(dictionary, self._device)

    def _make_room(self, num_bytes: int) -> None:
        """Unload unused dictionaries, the longest unused first; raise if those in use leave no room."""
        unused = [key for key, loaded in self._loaded.items() if not loaded.num_users]
        while self.num_bytes + num_bytes > self._max_bytes:
            if not unused:
                free = self._max_bytes - self.num_bytes
                raise InterventionError(
                    _FULL,
                    f"dictionaries that running requests use leave {free} bytes, and this one has "
                    f"{num_bytes}; try again later",
                )
            del self._loaded[unused.pop(0)]
