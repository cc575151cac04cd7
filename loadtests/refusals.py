"""What a server should answer to each thing that the hostile tenant does, if it does not let it in.

Any other answer, a key that is suddenly not known or an error of the server's own, is a failure of the run:
it would have been refused for a wrong reason, or not on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from api_schemas.errors import STATUS, ErrorCode

Answer = tuple[int, str]
"""A status and an error code; vLLM's own errors have their status for a code."""


def _ours(code: ErrorCode) -> Answer:
    return STATUS.get(code, HTTPStatus.BAD_REQUEST), code


def _vllms(status: HTTPStatus) -> Answer:
    return status, str(int(status))


_BUSY: Final = {
    _ours(ErrorCode.RATE_LIMITED),
    _ours(ErrorCode.QUEUE_FULL),
    _vllms(HTTPStatus.SERVICE_UNAVAILABLE),  # more than --max-num-queued-reqs
}
_TOO_LONG: Final = {_vllms(HTTPStatus.BAD_REQUEST), _ours(ErrorCode.INVALID_VALUE)}
CLOSED: Final = _ours(ErrorCode.BODY_TOO_LARGE)
"""What it means if a connection is closed in the middle of a body."""
EXPECTED: Final[Mapping[str, frozenset[Answer]]] = {
    "flood": frozenset(_BUSY),
    "huge-body": frozenset(_BUSY | _TOO_LONG | {CLOSED}),
    "break-off": frozenset(_BUSY),
    "endless-block": frozenset(_BUSY),
}
"""By kind of request."""
ENDED: Final = frozenset({ErrorCode.TRACE_FAILED, ErrorCode.TRACE_TIMED_OUT})
"""How an endless block ends that was let in."""

__all__ = ["CLOSED", "ENDED", "EXPECTED", "Answer"]
