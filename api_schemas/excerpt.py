"""Short texts of JSON values for error messages; requests determine them, so they must be valid UTF-8."""

from __future__ import annotations

import reprlib
from typing import Final

_MAX_CHARACTERS: Final = 64
_MAX_ITEMS: Final = 4
_MAX_BITS: Final = 64


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = self.maxdict = _MAX_ITEMS
        self.maxstring = self.maxother = _MAX_CHARACTERS

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to convert very long integers to text.
        del level
        return str(x) if x.bit_length() <= _MAX_BITS else f"an integer of {x.bit_length()} bits"


def excerpt(value: object) -> str:
    return _encodable(_Repr().repr(value))


def clip(text: str) -> str:
    """Return the text without quotes, shortened if it is long."""
    return _encodable(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…")


def _encodable(text: str) -> str:
    # A lone surrogate would make the response impossible to encode.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
