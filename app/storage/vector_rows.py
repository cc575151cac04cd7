from __future__ import annotations

import dataclasses
import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

LAYER_PREFIX: Final = "layers.*."


@dataclasses.dataclass(frozen=True, slots=True)
class VectorRows:
    """The values of a stored vector, ``[layers, width]``; ``leaf`` is such as ``output`` of a layer."""

    leaf: str
    layers: tuple[int, ...]
    values: Floats

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    @property
    def data(self) -> bytes:
        """The values, rows by layer, float32 and little-endian."""
        return np.ascontiguousarray(self.values, "<f4").tobytes()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def kind_of(leaf: str) -> str:
    return f"{LAYER_PREFIX}{leaf}"


__all__ = ["LAYER_PREFIX", "Floats", "VectorRows", "kind_of"]
