"""Responses as JSON for all clients: non-finite numbers become null, lone surrogates become escapes."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from api_schemas.errors import printable

_PIECE_ITEMS: Final = 2000
"""Numbers, or objects of one, that are made and serialized before other requests have their turn: some ms."""


class Rows:
    """A list that is serialized in pieces; ``make`` returns the rows of a range.

    ``row_size`` counts the numbers or objects of one row.
    """

    def __init__(self, num_rows: int, row_size: int, make: Callable[[int, int], Iterable[Any]]) -> None:
        self._num_rows = num_rows
        self._row_size = max(1, row_size)
        self._make = make

    def pieces(self) -> Iterator[tuple[list[Any], int]]:
        """Yield the list in pieces, each with the number of its numbers or objects."""
        step = max(1, _PIECE_ITEMS // self._row_size)
        for start in range(0, self._num_rows, step):
            rows = list(self._make(start, min(start + step, self._num_rows)))
            yield rows, len(rows) * self._row_size


_AT_ONCE: Final = 128 * 1024
"""Characters that are encoded before the event loop runs again."""


def json_text(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return a value as strict JSON that can be encoded in UTF-8; ``default`` is that of ``json.dumps``."""
    try:
        text = _dumped(value, default)
        text.encode()
    except ValueError:  # of either: UnicodeEncodeError is a ValueError too
        return _dumped(_sendable(value), default)
    return text


async def encoded_json(value: Any) -> bytes:
    """Return a request's JSON again while the event loop runs; in a thread the encoder would keep the GIL."""
    encoded, until_pause = bytearray(), _AT_ONCE
    for piece in _pieces(value):
        encoded += piece.encode()
        if len(encoded) > until_pause:
            until_pause = len(encoded) + _AT_ONCE
            await asyncio.sleep(0)
    return bytes(encoded)


def _pieces(value: Any) -> Iterator[str]:
    """Yield the JSON of a value in pieces that are encoded at once, long texts in several."""
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


async def json_bytes(value: Any) -> bytes:
    """Return a value, which may contain ``Rows``, as strict JSON; between their pieces the loop is free."""
    mark = secrets.token_hex(16)
    rows_by_key: dict[str, Rows] = {}

    def hold(rows: Any) -> str:
        """Have ``Rows`` serialized as a key, which is replaced by their pieces afterwards."""
        if not isinstance(rows, Rows):
            raise TypeError(f"{type(rows).__name__} cannot be serialized as JSON")
        key = f"{mark}-{id(rows)}"
        rows_by_key[key] = rows
        return key

    text = json_text(value, hold)
    if not rows_by_key:
        return text.encode()
    encoded, num_items = list[bytes](), 0
    for index, part in enumerate(re.split(f'"({mark}-[0-9]+)"', text)):
        if index % 2 == 0:
            encoded.append(part.encode())
            continue
        encoded.append(b"[")
        for piece_index, (rows, size) in enumerate(rows_by_key[part].pieces()):
            encoded += (b"," if piece_index else b"", json_text(rows)[1:-1].encode())
            num_items += size
            if num_items >= _PIECE_ITEMS:
                num_items = 0
                await asyncio.sleep(0)
        encoded.append(b"]")
    return b"".join(encoded)


def _dumped(value: Any, default: Callable[[Any], Any] | None) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=default)


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
