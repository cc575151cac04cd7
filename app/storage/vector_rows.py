"""The values of a stored vector: one row for each of its layers, in the form in which they are kept."""

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
    """The values of a vector.

    Attributes:
        leaf: The kind of points that they belong to, such as ``output`` of a layer.
        layers: The layer of each row, ascending.
        values: The rows, ``[layers, width]``.
    """

    leaf: str
    layers: tuple[int, ...]
    values: Floats

    @property
    def width(self) -> int:
        """The number of values in a row."""
        return int(self.values.shape[1])

    @property
    def data(self) -> bytes:
        """The values, rows by layer, float32 and little-endian."""
        return np.ascontiguousarray(self.values, "<f4").tobytes()

    @property
    def sha256(self) -> str:
        """The SHA-256 of ``data``, hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()


def kind_of(leaf: str) -> str:
    """Return the pattern that matches a leaf of every layer."""
    return f"{LAYER_PREFIX}{leaf}"


__all__ = ["LAYER_PREFIX", "Floats", "VectorRows", "kind_of"]
