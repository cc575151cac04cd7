"""The middleware that records each request, from its first byte to the last byte of its response.

The record yields metrics, a log line, the span and, with keys, the audit entry of requests that run or change
something.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from http import HTTPStatus
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_schemas.errors import ErrorCode
from app.audit import AuditLog, Record
from app.auth.keys import Keys
from app.engine.client import EngineClient
from app.http.contexts import RequestContext, context_of
from app.http.gate import API_PREFIX
from app.observability.logs import log_request
from app.observability.metrics import Metrics, outcome_of
from app.observability.tracing import RequestSpan, Tracing

_READS: Final = {"GET", "HEAD", "OPTIONS"}
_UNFINISHED: Final = "client_left"
_NOT_RUN: Final = {ErrorCode.RATE_LIMITED}
"""Rejections that may occur thousands of times per second and ran nothing."""
_STARTS: Final = {"http.response.start", "websocket.http.response.start"}
_SOCKET_ANSWERS: Final = {
    "websocket.accept": HTTPStatus.SWITCHING_PROTOCOLS,
    "websocket.close": HTTPStatus.FORBIDDEN,
    "websocket.http.response.body": HTTPStatus.FORBIDDEN,
}
"""The status of responses whose messages contain none."""
_ERROR_STATUS: Final = 400
_REQUEST_ID: Final = b"x-request-id"
_TIMED: Final = {"/v1/completions", "/v1/chat/completions", "/v1/traces"}


class RecordMiddleware:
    """Records all requests; with ``repeats_ids`` the answer has the ``x-request-id`` of its request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        log: AuditLog,
        keys: Keys,
        metrics: Metrics,
        engine: EngineClient,
        tracing: Tracing | None,
        repeats_ids: bool = False,
    ) -> None:
        self._app = app
        self._repeats_ids = repeats_ids
        self._log = log
        self._keys = keys
        self._metrics = metrics
        self._engine = engine
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        context = context_of(scope)
        record, span = context.record, None
        if self._tracing is not None and str(scope["path"]).startswith(API_PREFIX):
            span = self._tracing.begin(scope, context)
        is_kept = scope["type"] == "http" and record.method not in _READS and await self._has_log()
        if is_kept:
            self._log.begin(record)
        try:
            await self._watched(record, span, scope, receive, send)
        finally:
            record.tier, record.marked = context.tier, [kind for kind, _ in context.marked]
            if context.admitted is not None:
                record.add_use(context.meter)
            if is_kept and record.key_id and record.error not in _NOT_RUN:
                self._log.add(record)
            elif is_kept:
                self._log.drop(record)
            if not record.route and (route := getattr(scope.get("route"), "path", None)):
                record.route = route
            self._report(context, span)

    async def _has_log(self) -> bool:
        if not self._log.is_on:
            return False
        try:
            return await self._keys.are_required()
        except Exception:  # noqa: BLE001 - the route's own check fails the same way and reports the error
            return True

    async def _watched(
        self, record: Record, span: RequestSpan | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = dict(scope["headers"]) if self._repeats_ids else {}
        request_id = headers.get(_REQUEST_ID, record.request_id.encode())
        start, watch = record.begun_s, _Watch(record, span, receive, send, request_id)
        try:
            await self._app(scope, watch.receive, watch.send)
        except ClientDisconnect:
            raise
        except Exception:
            record.status = record.status or HTTPStatus.INTERNAL_SERVER_ERROR
            record.error, watch.is_whole = ErrorCode.INTERNAL, True
            raise
        finally:
            record.duration_s = time.perf_counter() - start
            if not watch.is_whole:
                record.error = record.error or _UNFINISHED

    def _report(self, context: RequestContext, span: RequestSpan | None) -> None:
        metrics, record = self._metrics, context.record
        served = self._engine.served()
        models = (*served.names, *served.adapters)
        metrics.count_request(record, models)
        if record.route in _TIMED and outcome_of(record) == "ok":
            metrics.count_time(record)
        if record.uses and (record.status or _ERROR_STATUS) < _ERROR_STATUS:
            metrics.count_use(record, points_of(self._engine), context.meter.captured_bytes)
        log_request(record)
        if span is not None:
            span.end(context, models)


class _Watch:
    def __init__(
        self, record: Record, span: RequestSpan | None, receive: Receive, send: Send, request_id: bytes
    ) -> None:
        self.is_whole = False
        self._record = record
        self._receive = receive
        self._send = send
        self._headers = [(_REQUEST_ID, request_id)]
        if span is not None and span.answer_header is not None:
            self._headers.append(span.answer_header)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._record.request_bytes += len(message.get("body", b""))
            self._record.begun_s = time.perf_counter()
        return message

    async def send(self, message: Message) -> None:
        kind, record = message["type"], self._record
        if kind == "http.response.body":
            record.response_bytes += len(message.get("body", b""))
            self.is_whole = not message.get("more_body", False)
        elif kind in _STARTS:
            record.status = message["status"]
            message["headers"] = [*message.get("headers", []), *self._headers]
        elif kind in _SOCKET_ANSWERS:
            record.status, self.is_whole = record.status or _SOCKET_ANSWERS[kind], True
        await self._send(message)


def points_of(engine: EngineClient) -> Collection[str]:
    """Return the kinds of points of the model; empty while no engine is ready."""
    if not engine.ready:
        return ()
    return {point.name for point in engine.capabilities().points}
