"""A dictionary whose weights are a file on this machine, as operations name it."""

from __future__ import annotations

import dataclasses

from nnsight_engine.features.config import DictionaryConfig


@dataclasses.dataclass(frozen=True, slots=True)
class StoredDictionary:
    """A dictionary in a file.

    Attributes:
        config: Its definition.
        at: The point that it reads.
        output_at: The point whose value it reconstructs: that of a transcoder's output, otherwise ``at``.
        sha256: The SHA-256 of the file, which is the same as long as the numbers are.
        path: The file, for ``weights_file.load_dictionary``.
        dtype: The dtype of its weights, by torch's name.
    """

    config: DictionaryConfig
    at: str
    output_at: str
    sha256: str
    path: str
    dtype: str


__all__ = ["StoredDictionary"]
