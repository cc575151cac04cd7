"""Reads request bodies into JSON objects and enforces every limit before the work it bounds.

The size is counted while reading. The nesting depth is checked before parsing, because the parser recurses.
Numbers that JSON does not define (NaN, infinities) are rejected while parsing. Routes call ``read_object``
once per request; routes whose bodies are not JSON call ``read_bytes`` or ``stream_bytes``.
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
"""Escapes of surrogates. Valid JSON has them in pairs, for characters beyond U+FFFF."""
_IRRELEVANT: Final = bytes(set(range(256)) - set(b'[]{}"'))
_SCAN_CHUNK_BYTES: Final = 64 * 1024
THREAD_BYTES: Final = 1024 * 1024
"""Bodies larger than this are processed in a thread."""
_LARGE_BYTES: Final = 128 * 1024
"""Bodies of at least this size are parsed in a separate process, see ``large_bodies``."""
_SMALL_BYTES: Final = 16 * 1024
"""The fields of smaller bodies are not counted, unless so small a body can exceed a limit."""
_STEPS: Final = np.zeros(256, dtype=np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_STEPS.setflags(write=False)


@dataclasses.dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of one body.

    Attributes:
        max_bytes: The maximum size in bytes.
        max_depth: The maximum nesting depth of arrays and objects.
        idle_s: The longest pause between two chunks, in seconds; None for no limit.
    """

    max_bytes: int
    max_depth: int
    idle_s: float | None = None


async def read_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """Read the request's body and parse it as a JSON object.

    Returns:
        The JSON object.

    Raises:
        ApiError: ``bad_request`` (wrong content type), ``body_too_large``, ``upload_timed_out``,
            ``json_too_deep``, ``not_finite``, ``invalid_json``, ``invalid_shape``.
        ClientDisconnect: The client disconnected before the end of the body.
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
    if bodies is None or len(body) < min(_SMALL_BYTES, bodies.limits.least_bytes):
        return value
    return checked(value, bodies.limits)


def check_media_type(request: Request, expected: str) -> None:
    """Raise ApiError unless the request's body has the content type ``expected``."""
    media_type = request.headers.get("content-type", "").split(";", maxsplit=1)[0].strip().lower()
    if media_type != expected:
        message = f"A request needs the header 'Content-Type: {expected}', got {media_type!r}."
        raise ApiError(ErrorCode.BAD_REQUEST, message)


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
            _field_with_half(value),
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


def _field_with_half(body: Any) -> str | None:
    """Return the name of the field that contains a lone surrogate in its value or in its name."""
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

    Counts brackets outside strings, up to the position at which a parser would report an error. Works in
    chunks, so that a hostile body costs no more memory than an ordinary one.
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


async def read_bytes(request: Request, max_bytes: int, idle_s: float | None = None) -> bytearray:
    """Read the request's body, at most ``max_bytes`` of it.

    Args:
        request: A request whose body has not been read.
        max_bytes: The maximum size.
        idle_s: The longest pause between two chunks; a client that vanished in the middle of an upload sends
            no disconnect.

    Raises:
        ApiError: ``body_too_large``, ``upload_timed_out``, ``rate_limit_exceeded`` (the server already holds
            as many received bytes as it may).
        ClientDisconnect: The client disconnected before the end of the body.
    """
    body = bytearray()  # grows in place; joining a list of chunks would need twice the memory
    intake = intake_of(request.scope)
    async for chunk in stream_bytes(request, max_bytes, idle_s):
        if intake is not None:
            intake.add(len(chunk))
        body += chunk
    return body


async def stream_bytes(
    request: Request, max_bytes: int, idle_s: float | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of the request's body without buffering it; raise the errors of ``read_bytes``."""
    # A body that is too long by its Content-Length is rejected without being read. The server discards the
    # rest of it, so that clients which write before they read still receive the response.
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(f"{declared[:20]} bytes", max_bytes)
    num_bytes = 0
    chunks = aiter(request.stream())
    cutoff = cutoff_of(request.scope) or RequestDeadline()  # a deadline that is never reached
    while True:
        if cutoff.reached.done():
            # A client that keeps sending slowly never triggers the idle timeout.
            raise cutoff.reached.result()
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
        f"No data of the request body arrived for {idle_s or 0:g} s; send it again without such pauses.",
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(ErrorCode.NOT_FINITE, f"Numbers must be finite, got {name}; JSON has no such number.")
