"""A record for each request that may run or change something, from its first byte to its answer's last."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_schemas.errors import ErrorCode
from app.admission.rates import ADMITTED, Admitted
from app.audit.log import AuditLog
from app.audit.records import RECORD, Record
from app.auth.keys import Keys

_READS: Final = {"GET", "HEAD", "OPTIONS"}
_UNFINISHED: Final = "client_left"
_NOT_RUN: Final = {ErrorCode.RATE_LIMITED}
"""Refusals of which there may be thousands in a second, and which ran nothing."""


class AuditMiddleware:
    """Lets everything pass, and writes down who sent what runs or changes something, and what came of it."""

    def __init__(self, app: ASGIApp, log: AuditLog, keys: Keys) -> None:
        """Wrap ``app``; there are records only where there are keys."""
        self._app = app
        self._log = log
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection of the ASGI server."""
        is_changing = scope["type"] == "http" and scope["method"] not in _READS
        if is_changing and self._log.is_on and await self._keys.are_required():
            await self._recorded(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _recorded(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = Record(str(scope["method"]))
        token = RECORD.set(record)
        self._log.begin(record)
        start, is_whole = time.perf_counter(), False

        async def counted_receive() -> Message:
            message = await receive()
            record.request_bytes += len(message.get("body", b""))
            return message

        async def watched_send(message: Message) -> None:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                record.status = message["status"]
                sent = (b"x-request-id", record.request_id.encode())
                message["headers"] = [*message.get("headers", []), sent]
            elif message["type"] == "http.response.body":
                record.response_bytes += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, counted_receive, watched_send)
        except ClientDisconnect:
            raise
        except Exception:
            record.status = record.status or HTTPStatus.INTERNAL_SERVER_ERROR
            record.error, is_whole = ErrorCode.INTERNAL, True
            raise
        finally:
            RECORD.reset(token)
            record.duration_s = time.perf_counter() - start
            admitted: Admitted | None = scope.get(ADMITTED)
            record.add_use(None if admitted is None else admitted.meter)
            if not is_whole:
                record.error = record.error or _UNFINISHED
            if record.key_id and record.error not in _NOT_RUN:
                self._log.add(record)
            else:
                self._log.drop(record)


__all__ = ["AuditMiddleware"]
