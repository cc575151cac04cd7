"""Properties of dtypes by torch's names, for code that must not import torch; numpy has no bfloat16."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
"""Bytes per item."""

LARGEST: Final = {
    "float32": float(np.finfo(np.float32).max),
    "bfloat16": float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0]),
    "float16": float(np.finfo(np.float16).max),
}
"""The largest finite number of each float dtype."""

LARGEST_WEIGHT: Final = 1e16
"""The largest absolute value of a weight that activations are multiplied with, also of biases beside it.

Sums of such products, and of squares of a million weights, stay finite in float32. With larger ones a sum
may overflow on its way, and a score or an activation that should be positive is 0.
"""

WIDER: Final = {"float16": "bfloat16 or float32", "bfloat16": "float32"}
"""The dtypes with a larger range than the key's, for error messages."""

Floats = npt.NDArray[np.float32]


def floats_from_bytes(dtype: str, data: bytes) -> Floats:
    """Return little-endian values as a flat float32 array; exact for each of the three float dtypes."""
    if dtype == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    return np.frombuffer(data, "<f2" if dtype == "float16" else "<f4").astype(np.float32, copy=False)
