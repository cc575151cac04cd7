"""The dictionaries of live requests on the model's device.

They are read from files when first used; when memory is needed, unused ones go, the longest unused first.
"""

from __future__ import annotations

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
from nnsight_engine.plans.features import PlannedDictionary
from nnsight_engine.plans.step.host_arena import to_device

logger = logging.getLogger(__name__)

_SELECTION_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of the selections that are kept of a dictionary while requests use it."""
_FULL: Final = "dictionary_memory_full"


FailsAnywhere = Callable[[Exception | None], bool]


def is_failure(failure: Exception | None) -> bool:
    return failure is not None


class LoadedDictionary:
    def __init__(self, dictionary: Dictionary, device: torch.device) -> None:
        self.dictionary = dictionary
        self.num_users = 0
        self._device = device
        self._selections: OrderedDict[tuple[int, ...], Selection] = OrderedDict()
        config = dictionary.config
        self._bytes_of_one = 4 * (config.input_width + config.output_width)

    def selection(self, ids: tuple[int, ...]) -> Selection:
        found = self._selections.pop(ids, None)
        if found is None:
            found = Selection(self.dictionary, to_device(np.asarray(ids, np.int64), self._device))
        self._selections[ids] = found
        while self._bytes_of_one * sum(map(len, self._selections)) > _SELECTION_BYTES:
            self._selections.popitem(last=False)
        return found

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
        return sum(one.num_users > 0 for one in self._loaded.values())

    def acquire(self, planned: PlannedDictionary, paths: Mapping[str, str]) -> LoadedDictionary:
        """Return a dictionary, and add a user.

        Raises ``dictionary_memory_full``, or ``intervention_failed`` if its file cannot be read.
        """
        found = self._loaded.get(planned)
        if found is None:
            self._make_room(planned.num_bytes)
            found = self._loaded[planned] = self._load_everywhere(planned, Path(paths[planned.sha256]))
        found.num_users += 1
        return found

    def release(self, planned: PlannedDictionary) -> None:
        found = self._loaded[planned]
        found.num_users -= 1
        if not found.num_users:
            found.forget_selections()
            self._loaded.move_to_end(planned)

    def _load_everywhere(self, planned: PlannedDictionary, path: Path) -> LoadedDictionary:
        """Load a dictionary, unless another rank fails to: it would compute without the request."""
        found: LoadedDictionary | None = None
        failure: InterventionError | None = None
        try:
            found = self._load(planned, path)
        except InterventionError as error:
            failure = error
        if self._fails_anywhere(failure) or found is None:
            raise failure or InterventionError(
                "intervention_failed", "another rank could not load the dictionary"
            )
        return found

    def _load(self, planned: PlannedDictionary, path: Path) -> LoadedDictionary:
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
