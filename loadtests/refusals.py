"""The allowed rejections of each attack of the hostile tenant.

Any other response, such as an unknown key or an internal error of the server, is a failure of the run: the
request would have been rejected for a wrong reason, or not on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from api_schemas.errors import ErrorCode

Answer = tuple[int, str]
"""A status and an error code; vLLM's own errors have their status as code."""


def _ours(code: ErrorCode) -> Answer:
    return code.status, code


def _vllms(status: HTTPStatus) -> Answer:
    return status, str(int(status))


_BUSY: Final = {
    _ours(ErrorCode.RATE_LIMITED),
    _ours(ErrorCode.QUEUE_FULL),
    _vllms(HTTPStatus.SERVICE_UNAVAILABLE),  # more than --max-num-queued-reqs
}
_TOO_LONG: Final = {_vllms(HTTPStatus.BAD_REQUEST), _ours(ErrorCode.INVALID_VALUE)}
CLOSED: Final = _ours(ErrorCode.BODY_TOO_LARGE)
"""The meaning of a connection that is closed in the middle of a body."""
EXPECTED: Final[Mapping[str, frozenset[Answer]]] = {
    "flood": frozenset(_BUSY),
    "huge-body": frozenset(_BUSY | _TOO_LONG | {CLOSED}),
    "break-off": frozenset(_BUSY),
    "endless-block": frozenset(_BUSY),
}
"""The allowed rejections by kind of request."""
ENDED: Final = frozenset({ErrorCode.TRACE_FAILED, ErrorCode.TRACE_TIMED_OUT})
"""The errors with which the server may end an endless block."""

__all__ = ["CLOSED", "ENDED", "EXPECTED", "Answer"]
