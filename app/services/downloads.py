"""Download of a stored file, complete or resumed from an offset (RFC 9110, section 14)."""

from __future__ import annotations

import re
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from app.http.errors import error_response
from app.services.streaming import ClosingStream
from app.storage.open_files import OpenResult

_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


async def download(
    request: Request, file: OpenResult, *, media_type: str, tag: str, stall_s: float
) -> Response:
    """Return a file, closed when the response ends, or the one range of it that the request asks for.

    Several ranges, or a malformed one, return the whole file. ``tag`` changes with the content; a client that
    reads nothing for ``stall_s`` is disconnected.
    """
    size = file.num_bytes
    headers = {"Accept-Ranges": "bytes", "ETag": tag, "Cache-Control": "private, no-store"}
    requested = _requested_range(request, size, tag)
    start, stop = requested or (0, size)
    if requested is not None and start >= stop:
        await file.close()
        error = ApiError(
            ErrorCode.RANGE_NOT_SATISFIABLE, f"The file has {size} bytes, and the range begins behind them."
        )
        return error_response(error, {**headers, "Content-Range": f"bytes */{size}"})
    is_part = (start, stop) != (0, size)
    if is_part:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return ClosingStream(
        file.chunks(start, stop),
        status_code=206 if is_part else 200,
        media_type=media_type,
        headers={**headers, "Content-Length": str(stop - start)},
        on_close=file.close,
        stall_s=stall_s,
    )


def _requested_range(request: Request, size: int, tag: str) -> tuple[int, int] | None:
    """Return the requested range as (start, stop); None for the whole file, empty if unsatisfiable."""
    match = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if match is None or request.headers.get("if-range", tag) != tag:
        return None
    first, last = match.groups()
    if first:
        stop = min(size, int(last) + 1) if last else size
        return None if last and int(last) < int(first) else (int(first), stop)
    if not last or (not size and int(last)):  # the last bytes of an empty file are all of it
        return None
    return max(0, size - int(last)), size
