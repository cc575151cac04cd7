"""JSON of request bodies: the nesting depth is checked before parsing, because the parser recurses.

Numbers that JSON does not define (NaN, infinities) are rejected while parsing.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

import numpy as np

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip

_QUOTE: Final = ord('"')
_HALVES: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escapes of surrogates. Valid JSON has them in pairs, for characters beyond U+FFFF."""
_IRRELEVANT: Final = bytes(set(range(256)) - set(b'[]{}"'))
_SCAN_CHUNK_BYTES: Final = 64 * 1024
_STEPS: Final = np.zeros(256, dtype=np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_STEPS.setflags(write=False)


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parse UTF-8 JSON whose depth is already checked; raise the errors of ``read_object``."""
    value: Any = None
    try:
        # A byte order mark is accepted, as json.loads does for bytes. UTF-16 is not, because the depth was
        # counted on single bytes.
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if _HALVES.search(body):
            # Raises for lone surrogates; paired ones were joined into characters.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            ErrorCode.INVALID_JSON,
            "A string of the body contains half of a character (a lone surrogate, such as "
            f"{error.object[error.start]!a}), which UTF-8 cannot encode; send complete characters.",
            _field_with_lone_surrogate(value),
        ) from error
    except ValueError as error:
        # Invalid UTF-8, invalid JSON and integers beyond Python's digit limit are all ValueError.
        raise ApiError(ErrorCode.INVALID_JSON, f"The body must be JSON in UTF-8: {error}.") from error
    except RecursionError as error:
        raise ApiError(ErrorCode.JSON_TOO_DEEP, "The body's JSON is nested too deeply to parse.") from error
    if not isinstance(value, dict):
        raise ApiError(
            ErrorCode.INVALID_SHAPE, f"The body must be a JSON object, got {type(value).__name__}."
        )
    return value


def _field_with_lone_surrogate(body: Any) -> str | None:
    for name, value in body.items() if isinstance(body, dict) else ():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return clip(name)
    return None


def check_depth(body: bytes | bytearray, max_depth: int) -> None:
    if exceeds_depth(body, max_depth):
        raise ApiError(
            ErrorCode.JSON_TOO_DEEP,
            f"Arrays and objects may nest {max_depth} deep, and the body goes deeper; flatten it.",
        )


def exceeds_depth(body: bytes | bytearray, max_depth: int) -> bool:
    """Return whether arrays and objects nest too deep, in linear time and in chunks of bounded memory.

    Counts brackets outside strings, up to the position at which a parser would report an error.
    """
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False
    # Escape pairs are removed first (in a run of backslashes they pair from the left); every remaining quote
    # then opens or closes a string.
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    text = text.translate(None, _IRRELEVANT)
    depth, in_string = 0, 0
    for start in range(0, len(text), _SCAN_CHUNK_BYTES):
        chunk = np.frombuffer(text[start : start + _SCAN_CHUNK_BYTES], dtype=np.uint8)
        inside = (np.cumsum(chunk == _QUOTE, dtype=np.int32) + in_string) & 1
        depths = np.cumsum(_STEPS[chunk] * (1 - inside), dtype=np.int64) + depth
        if depths.max() > max_depth:
            return True
        depth, in_string = int(depths[-1]), int(inside[-1])
    return False


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(ErrorCode.NOT_FINITE, f"Numbers must be finite, got {name}; JSON has no such number.")
