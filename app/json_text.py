"""Serializes responses as JSON that every client can parse: no NaN, no infinity, no lone surrogates.

Models overflow, and users' code saves arbitrary values. Non-finite numbers become null, as in results of
operations; lone surrogates, which UTF-8 cannot encode, become escapes, as in printed text.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any, Final

from starlette.responses import JSONResponse

_AT_ONCE: Final = 128 * 1024
"""Characters that are encoded before the event loop runs again."""


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


async def encoded_json(value: Any) -> bytes:
    """Return a request's JSON encoded again; the event loop runs meanwhile, however large it is.

    A thread would not do: the encoder keeps the interpreter's lock.
    """
    encoded, until_pause = bytearray(), _AT_ONCE
    for piece in _pieces(value):
        encoded += piece.encode()
        if len(encoded) > until_pause:
            until_pause = len(encoded) + _AT_ONCE
            await asyncio.sleep(0)
    return bytes(encoded)


def _pieces(value: Any) -> Iterator[str]:
    """Yield the JSON of a value in pieces of bounded size."""
    if isinstance(value, dict):
        for index, (key, item) in enumerate(value.items()):
            yield f"{', ' if index else '{'}{json.dumps(key)}: "
            yield from _pieces(item)
        yield "}" if value else "{}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield ", " if index else "["
            yield from _pieces(item)
        yield "]" if value else "[]"
    elif isinstance(value, str) and len(value) > _AT_ONCE:
        yield '"'
        for start in range(0, len(value), _AT_ONCE):
            yield json.dumps(value[start : start + _AT_ONCE])[1:-1]
        yield '"'
    else:
        yield json.dumps(value)


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


__all__ = ["JsonAnswer", "encoded_json", "json_text", "printable"]
