"""Features of a dictionary, as plans name them."""

from __future__ import annotations

import msgspec

from nnsight_engine.features.config import DictionaryConfig
from nnsight_engine.plans.sites import PlannedSite


class PlannedDictionary(msgspec.Struct, frozen=True, array_like=True):
    """A dictionary: the SHA-256 of the file of its weights, hexadecimal, and its definition."""

    sha256: str
    config: DictionaryConfig


class PlannedFeatures(msgspec.Struct, frozen=True, omit_defaults=True):
    """The features that an operation or a test reads or changes.

    Attributes:
        dictionary: Their dictionary.
        ids: The features, no one twice; empty for the most active.
        top_k: Number of the most active features.
        gains: Of a write: ``a`` becomes ``gain * a + offset``, a number for each feature.
        offsets: Likewise.
        source: Of a write: the site that the dictionary reads, if it is not the one where the operation acts.
    """

    dictionary: PlannedDictionary
    ids: tuple[int, ...] = ()
    top_k: int = 0
    gains: tuple[float, ...] = ()
    offsets: tuple[float, ...] = ()
    source: PlannedSite | None = None
