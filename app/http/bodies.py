"""Reads request bodies, and enforces every limit before the work it bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any, Final

from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from app.formats.json_bodies import MAX_JSON_DEPTH, check_depth, checked, parse_object
from app.http.contexts import context_of, while_connected

THREAD_BYTES: Final = 1024 * 1024
"""Bodies larger than this are processed in a thread."""
_LARGE_BYTES: Final = 128 * 1024
"""Bodies of at least this size are parsed in a separate process, see ``large_bodies``."""
_SMALL_BYTES: Final = 16 * 1024
"""The fields of smaller bodies are not counted, unless so small a body can exceed a limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one body; ``idle_s`` is the longest pause between two chunks, None for no limit."""

    max_bytes: int
    idle_s: float | None = None


async def read_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """Read the request's body as a JSON object; raises the errors of ``read_bytes`` and of the checks.

    The checks' codes are ``bad_request`` (wrong content type), ``json_too_deep``, ``not_finite``,
    ``invalid_json``, ``invalid_shape``.
    """
    check_media_type(request, "application/json")
    body = await read_bytes(request, limits.max_bytes, limits.idle_s)
    context = context_of(request.scope)
    bodies = context.bodies
    if bodies is not None and len(body) >= _LARGE_BYTES:
        reading = bodies.read(body, context.tenant)
        return await while_connected(request.receive, reading, context.deadline)
    check_depth(body, MAX_JSON_DEPTH)
    value = parse_object(body)
    if bodies is None or len(body) < min(_SMALL_BYTES, bodies.limits.min_bytes):
        return value
    return checked(value, bodies.limits)


def check_media_type(request: Request, expected: str) -> None:
    media_type = request.headers.get("content-type", "").split(";", maxsplit=1)[0].strip().lower()
    if media_type != expected:
        message = f"A request needs the header 'Content-Type: {expected}', got {media_type!r}."
        raise ApiError(ErrorCode.BAD_REQUEST, message)


async def read_bytes(request: Request, max_bytes: int, idle_s: float | None = None) -> bytearray:
    """Read the request's body; ``idle_s`` bounds pauses: a client that vanished sends no disconnect.

    Raises:
        ApiError: ``body_too_large``, ``upload_timed_out``, ``rate_limit_exceeded`` (the server already holds
            as many received bytes as it may).
        ClientDisconnect: The client disconnected before the end of the body.
    """
    body = bytearray()  # grows in place; joining a list of chunks would need twice the memory
    received = context_of(request.scope).received
    async for chunk in stream_bytes(request, max_bytes, idle_s):
        if received is not None:
            received.add(len(chunk))
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
    deadline = context_of(request.scope).deadline
    while True:
        if deadline.reached.done():
            # A client that keeps sending slowly never triggers the idle timeout.
            raise deadline.reached.result()
        try:
            async with deadline.pause(idle_s):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            raise deadline.error or _too_slow(idle_s) from error
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
