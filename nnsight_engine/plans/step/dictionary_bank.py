"""The dictionaries of live requests on the model's device.

A dictionary is read from its file when the first request that uses it arrives, and kept while there is memory
for it: those that no request uses are unloaded when another one needs the memory, the longest unused first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import safetensors
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.features.dictionary import Dictionary, Selection
from nnsight_engine.features.weights_file import load_dictionary
from nnsight_engine.plans.features import PlannedDictionary
from nnsight_engine.plans.step.host_arena import to_device

logger = logging.getLogger(__name__)

_MAX_SELECTIONS: Final = 8
_FULL: Final = "dictionary_memory_full"
DICTIONARY_BYTES: Final = 2 * 1024**3
"""The default limit on the bytes of all loaded dictionaries."""


class LoadedDictionary:
    """A dictionary on the device, and the selections of its features that steps have used last.

    Attributes:
        dictionary: The dictionary.
        num_bytes: The bytes of its tensors.
        num_users: The number of its uses by live requests.
    """

    def __init__(self, dictionary: Dictionary, device: torch.device) -> None:
        self.dictionary = dictionary
        self.num_bytes = sum(tensor.nbytes for tensor in dictionary.tensors.values())
        self.num_users = 0
        self._device = device
        self._selections: OrderedDict[tuple[int, ...], Selection] = OrderedDict()

    def selection(self, ids: tuple[int, ...]) -> Selection:
        """Return some of its features, each once."""
        found = self._selections.get(ids)
        if found is None:
            index = to_device(np.asarray(ids, np.int64), self._device)
            found = self._selections[ids] = Selection(self.dictionary, index)
            if len(self._selections) > _MAX_SELECTIONS:
                self._selections.popitem(last=False)
        self._selections.move_to_end(ids)
        return found

    def forget_selections(self) -> None:
        """Free the memory of all selections."""
        self._selections.clear()


class DictionaryBank:
    """Loads dictionaries, and counts their memory.

    Args:
        device: The model's device.
        max_bytes: Limit on the bytes of all loaded dictionaries.
    """

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self._device = device
        self._max_bytes = max_bytes
        self._loaded: OrderedDict[PlannedDictionary, LoadedDictionary] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """The bytes of all loaded dictionaries."""
        return sum(one.num_bytes for one in self._loaded.values())

    @property
    def num_used(self) -> int:
        """The number of dictionaries that live requests use."""
        return sum(one.num_users > 0 for one in self._loaded.values())

    def acquire(self, planned: PlannedDictionary, paths: Mapping[str, str]) -> LoadedDictionary:
        """Return a dictionary, and add a user.

        Args:
            planned: The dictionary.
            paths: The file of its weights, by SHA-256.

        Raises:
            InterventionError: ``dictionary_memory_full``, ``tensor_too_large``; ``intervention_failed``: the
                file cannot be read.
        """
        found = self._loaded.get(planned)
        if found is None:
            found = self._loaded[planned] = self._load(planned, Path(paths[planned.sha256]))
        self._loaded.move_to_end(planned)
        found.num_users += 1
        return found

    def release(self, planned: PlannedDictionary) -> None:
        """Remove a user; the dictionary stays until its memory is needed."""
        found = self._loaded[planned]
        found.num_users -= 1
        if not found.num_users:
            found.forget_selections()

    def _load(self, planned: PlannedDictionary, path: Path) -> LoadedDictionary:
        try:
            num_bytes = path.stat().st_size
            self._make_room(num_bytes)
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
                "the weights of the dictionary could not be read; the machines of all engines need the "
                "folder dictionary_dir",
            ) from error
        logger.info("loaded a dictionary of %d features, %d bytes", planned.config.num_features, num_bytes)
        return LoadedDictionary(dictionary, self._device)

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise InterventionError(
                "tensor_too_large",
                f"the dictionary has {num_bytes} bytes, and all loaded dictionaries of this server may have "
                f"{self._max_bytes} (loaded_dictionary_bytes)",
            )
        unused = [key for key, one in self._loaded.items() if not one.num_users]
        while self.num_bytes + num_bytes > self._max_bytes:
            if not unused:
                left = self._max_bytes - self.num_bytes
                raise InterventionError(
                    _FULL,
                    f"dictionaries that running requests use leave {left} bytes, and this one has "
                    f"{num_bytes}; try again later",
                )
            del self._loaded[unused.pop(0)]
