"""Serializes responses as JSON that every client can parse: no NaN, no infinity, no lone surrogates.

Models overflow, and users' code saves arbitrary values. Non-finite numbers become null, as in results of
operations; lone surrogates, which UTF-8 cannot encode, become escapes, as in printed text.
"""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import JSONResponse


def printable(text: str) -> str:
    """Return ``text`` with lone surrogates, which UTF-8 cannot encode, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_text(value: Any) -> str:
    """Return a value as strict JSON that can be encoded in UTF-8."""
    try:
        text = _dumped(value)
        text.encode()
    except ValueError:  # of either: UnicodeEncodeError is a ValueError too
        return _dumped(_sendable(value))
    return text


class JsonAnswer(JSONResponse):
    """A response with strict JSON."""

    def render(self, content: Any) -> bytes:
        """Return the encoded body."""
        return json_text(content).encode()


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _sendable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_sendable(key): _sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sendable(item) for item in value]
    return value


__all__ = ["JsonAnswer", "json_text", "printable"]
