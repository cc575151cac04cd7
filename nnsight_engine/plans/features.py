from __future__ import annotations

import msgspec

from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.features.config import DictionaryConfig
from nnsight_engine.plans.sites import PlannedSite


class PlannedDictionary(msgspec.Struct, frozen=True, array_like=True):
    """``sha256`` is that of the file of its weights, hexadecimal; ``dtype`` is torch's name."""

    sha256: str
    config: DictionaryConfig
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.config.num_values * ITEM_BYTES[self.dtype]


class PlannedFeatures(msgspec.Struct, frozen=True, omit_defaults=True):
    """The features that an operation or a test reads or changes; no ``ids`` for the ``top_k`` most active.

    A write makes ``gain * a + offset`` of ``a``; ``source`` is the site that its dictionary reads, if that is
    another.
    """

    dictionary: PlannedDictionary
    ids: tuple[int, ...] = ()
    top_k: int = 0
    gains: tuple[float, ...] = ()
    offsets: tuple[float, ...] = ()
    source: PlannedSite | None = None
