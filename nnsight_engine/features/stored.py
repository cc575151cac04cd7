from __future__ import annotations

import dataclasses

from nnsight_engine.features.config import DictionaryConfig


@dataclasses.dataclass(frozen=True, slots=True)
class StoredDictionary:
    """A dictionary in a file on this machine; ``output_at`` is ``at``, except for a transcoder."""

    config: DictionaryConfig
    at: str
    output_at: str
    sha256: str
    path: str
    dtype: str


__all__ = ["StoredDictionary"]
