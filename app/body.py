"""A request's body, from bytes to a JSON object, with every limit enforced before it can hurt.

The size is counted while reading, the nesting before parsing (the parser recurses), numbers
that JSON does not have are refused while parsing. Routes call ``read_object``, once per request;
those whose bodies are no JSON, ``read_bytes`` or ``stream_bytes``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import AsyncGenerator
from typing import Any, Final, NoReturn

import numpy as np
from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from app.body_fields import checked
from app.large_bodies import bodies_of
from app.received_bytes import intake_of
from app.request_deadline import RequestDeadline, cutoff_of
from app.services.disconnect import while_connected

_QUOTE: Final = ord('"')
_HALVES: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escapes of surrogates, which JSON has in pairs for characters beyond U+FFFF."""
_IRRELEVANT: Final = bytes(set(range(256)) - set(b'[]{}"'))
_SCAN_CHUNK_BYTES: Final = 64 * 1024
THREAD_BYTES: Final = 1024 * 1024
"""What is larger is looked at in a thread."""
_LARGE_BYTES: Final = 128 * 1024
"""What is larger is read in a process, see ``large_bodies``."""
_SMALL_BYTES: Final = 16 * 1024
"""What is smaller cannot hold much."""
_STEPS: Final = np.zeros(256, dtype=np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_STEPS.setflags(write=False)


@dataclasses.dataclass(frozen=True, slots=True)
class BodyLimits:
    """The most that one body may be: ``max_bytes`` long, ``max_depth`` deep, and ``idle_s`` on its way."""

    max_bytes: int
    max_depth: int
    idle_s: float | None = None


async def read_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """Read and parse the request's body.

    Returns:
        The JSON object.

    Raises:
        ApiError: ``bad_request`` (not JSON by its content type), ``body_too_large``,
            ``upload_timed_out``, ``json_too_deep``, ``not_finite``, ``invalid_json``, ``invalid_shape``.
        ClientDisconnect: The client went away before the end.
    """
    check_media_type(request, "application/json")
    body = await read_bytes(request, limits.max_bytes, limits.idle_s)
    bodies = bodies_of(request.scope)
    if bodies is not None and len(body) >= _LARGE_BYTES:
        intake = intake_of(request.scope)
        reading = bodies.read(body, "" if intake is None else intake.tenant)
        return await while_connected(request.receive, reading, cutoff_of(request.scope))
    check_depth(body, limits.max_depth)
    value = parse_object(body)
    return value if bodies is None or len(body) < _SMALL_BYTES else checked(value, bodies.limits)


def check_media_type(request: Request, expected: str) -> None:
    """Raise ApiError unless the request's body is of a content type."""
    media_type = request.headers.get("content-type", "").split(";", maxsplit=1)[0].strip().lower()
    if media_type != expected:
        message = f"A request needs the header 'Content-Type: {expected}', got {media_type!r}."
        raise ApiError(ErrorCode.BAD_REQUEST, message)


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parse UTF-8 JSON whose depth is already checked; raises as ``read_object`` does."""
    value: Any = None
    try:
        # A byte order mark is let through, as json.loads does for bytes; UTF-16 is not, because
        # the depth was counted on single bytes.
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if _HALVES.search(body):
            json.dumps(value, ensure_ascii=False).encode()  # which halves that make up a whole survive
    except UnicodeEncodeError as error:
        raise ApiError(
            ErrorCode.INVALID_JSON,
            "A string of the body holds half of a character (a lone surrogate, such as "
            f"{error.object[error.start]!a}), which UTF-8 cannot write; send whole characters.",
            _field_with_half(value),
        ) from error
    except ValueError as error:
        # Bad UTF-8, bad JSON, and integers beyond Python's limit on digits are all ValueError.
        raise ApiError(ErrorCode.INVALID_JSON, f"The body must be JSON in UTF-8: {error}.") from error
    except RecursionError as error:
        raise ApiError(ErrorCode.JSON_TOO_DEEP, "The body's JSON is nested too deeply to parse.") from error
    if not isinstance(value, dict):
        raise ApiError(
            ErrorCode.INVALID_SHAPE, f"The body must be a JSON object, got {type(value).__name__}."
        )
    return value


def _field_with_half(body: Any) -> str | None:
    """Return the field of a body that holds half of a character, or whose name does."""
    for name, value in body.items() if isinstance(body, dict) else ():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return clip(name)
    return None


def check_depth(body: bytes | bytearray, max_depth: int) -> None:
    """Raise ApiError, ``json_too_deep``, for a body that ``exceeds_depth``."""
    if exceeds_depth(body, max_depth):
        raise ApiError(
            ErrorCode.JSON_TOO_DEEP,
            f"Arrays and objects may nest {max_depth} deep, and the body goes deeper; flatten it.",
        )


def exceeds_depth(body: bytes | bytearray, max_depth: int) -> bool:
    """Return whether arrays and objects nest deeper than ``max_depth``, in linear time.

    Counts brackets outside strings, up to where a parser would stop at an error; works in chunks,
    so that a hostile body costs no more memory than an honest one.
    """
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False
    # Escape pairs go first (in a run of backslashes they pair from the left), then every quote
    # that is left opens or closes a string.
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


async def read_bytes(request: Request, max_bytes: int, idle_s: float | None = None) -> bytearray:
    """Return the request's body, read no further than ``max_bytes``.

    Args:
        request: Not read yet.
        max_bytes: Its largest size.
        idle_s: How long it may pause: whoever vanished in the middle does not say so.

    Raises:
        ApiError: ``body_too_large``, ``upload_timed_out``, ``rate_limit_exceeded`` (as much is held already).
        ClientDisconnect: The client went away before the end.
    """
    body = bytearray()  # which grows in place: a list of chunks, joined, would take its size twice
    intake = intake_of(request.scope)
    async for chunk in stream_bytes(request, max_bytes, idle_s):
        if intake is not None:
            intake.add(len(chunk))
        body += chunk
    return body


async def stream_bytes(
    request: Request, max_bytes: int, idle_s: float | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the request's body as it comes, for whoever does not hold it; raises as ``read_bytes`` does."""
    # An over-long body is answered without being read; the server discards the rest of it, so that
    # clients which write before they read still see the answer.
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(f"{declared[:20]} bytes", max_bytes)
    num_bytes = 0
    chunks = aiter(request.stream())
    cutoff = cutoff_of(request.scope) or RequestDeadline()  # one that nothing ends
    while True:
        if cutoff.reached.done():
            raise cutoff.reached.result()  # one that sends slowly enough never pauses
        try:
            async with cutoff.pause(idle_s):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            raise cutoff.error or _too_slow(idle_s) from error
        if chunk is None:
            return
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(f"at least {num_bytes} bytes", max_bytes)
        yield chunk


def _too_large(got: str, max_bytes: int) -> ApiError:
    return ApiError(
        ErrorCode.BODY_TOO_LARGE,
        f"A request's body may have {max_bytes} bytes, got {got}; send fewer or smaller tensors.",
    )


def _too_slow(idle_s: float | None) -> ApiError:
    return ApiError(
        ErrorCode.UPLOAD_TIMED_OUT,
        f"Nothing of the request's body came for {idle_s or 0:g} s; send it again, without such pauses.",
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(ErrorCode.NOT_FINITE, f"Numbers must be finite, got {name}; JSON has no such number.")
