"""``dumps`` and ``loads``: values as bytes, in the wire format instead of pickle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nnsight_engine.serialization.limits import DATA_ONLY, TRUSTED
from nnsight_engine.serialization.wire import decode, encode


def dumps(value: Any, path: str | os.PathLike[str] | None = None) -> bytes | None:
    """Return a value as bytes, or write it to ``path``: data, tensors, modules, functions, own classes.

    Raises:
        EncodeError: A part of the value cannot be encoded; the message names the part and the reason.
    """
    data = encode(value)
    if path is None:
        return data
    Path(path).write_bytes(data)
    return None


def loads(data: bytes | str | os.PathLike[str], *, trusted: bool = False) -> Any:
    """Decode a value that ``dumps`` returned as bytes, or wrote to a file.

    Args:
        data: The bytes, or the path of the file.
        trusted: Allow functions and classes, whose code then runs here. Data and tensors need no trust.

    Raises:
        DecodeError: The bytes are not a value, or contain code and ``trusted`` is False.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        data = Path(data).read_bytes()
    return decode(data, policy=TRUSTED if trusted else DATA_ONLY)
