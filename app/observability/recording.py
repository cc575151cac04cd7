"""The record of each request and of each run of a job, once it is over: metrics, log, spans, audit log.

The audit log has requests that run or change something, on servers with keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Scope

from api_schemas.errors import ErrorCode
from api_schemas.jobs import JobStatus
from app.audit import AuditLog, Record
from app.auth.keys import Keys
from app.engine.client import EngineClient
from app.http.contexts import RequestContext
from app.http.gate import API_PREFIX, Headers
from app.observability.logs import REQUEST_FIELDS, REQUEST_LOG
from app.observability.metrics import Metrics, outcome_of
from app.observability.tracing import RequestSpan, Tracing

_request_log = logging.getLogger(REQUEST_LOG)

_READS: Final = {"GET", "HEAD", "OPTIONS"}
_UNFINISHED: Final = "client_left"
_NOT_RUN: Final = {ErrorCode.RATE_LIMITED}
"""Rejections that may occur thousands of times per second and ran nothing."""
_ERROR_STATUS: Final = 400
_REQUEST_ID: Final = b"x-request-id"
_TIMED: Final = {"/v1/completions", "/v1/chat/completions", "/v1/traces"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    log: AuditLog
    keys: Keys
    metrics: Metrics
    engine: EngineClient
    tracing: Tracing | None

    @contextlib.asynccontextmanager
    async def recording(
        self, scope: Scope, context: RequestContext, *, repeats_id: bool = False
    ) -> AsyncIterator[Headers]:
        """Record the request of the block, from its first byte to the last byte of its response.

        With ``repeats_id`` the response has the ``x-request-id`` of the request.
        """
        record, span = context.record, None
        start = record.begun_s
        is_kept = scope["type"] == "http" and record.method not in _READS and await self._is_audited()
        if self.tracing is not None and str(scope["path"]).startswith(API_PREFIX):
            span = self.tracing.begin(scope, context)
        if is_kept:
            self.log.register(record)
        try:
            yield _headers(scope if repeats_id else {}, record.request_id, span)
        except ClientDisconnect:
            raise
        except Exception:
            record.status = record.status or HTTPStatus.INTERNAL_SERVER_ERROR
            record.error, context.is_answered = ErrorCode.INTERNAL, True
            raise
        finally:
            record.duration_s = time.perf_counter() - start
            if not context.is_answered:
                record.error = record.error or _UNFINISHED
            record.step_tier, record.marked = context.tier, [kind for kind, _ in context.marked]
            if context.admitted is not None:
                record.add_use(context.meter)
            if is_kept and record.key_id and record.error not in _NOT_RUN:
                self.log.add(record)
            elif is_kept:
                self.log.drop(record)
            if not record.route and (route := getattr(scope.get("route"), "path", None)):
                record.route = route
            self._publish(context, span)

    def job(self, context: RequestContext, traceparent: str) -> Callable[[JobStatus | None], None]:
        """Begin to record a run of a job; the function is called with its final status when it is over."""
        span = None if self.tracing is None else self.tracing.begin_job(context, traceparent)

        def on_over(ended: JobStatus | None) -> None:
            if ended is not None:
                self.metrics.count_job(ended)
            self.metrics.count_use(context.record, self._point_names(), context.meter.captured_bytes)
            if span is not None:
                span.end(context.record, ended)

        return on_over

    async def _is_audited(self) -> bool:
        """Return whether the audit log is on and the server has keys."""
        if not self.log.is_on:
            return False
        try:
            return await self.keys.are_required()
        except Exception:  # noqa: BLE001 - the route's own check fails the same way and reports the error
            return True

    def _publish(self, context: RequestContext, span: RequestSpan | None) -> None:
        """Update metrics, log and span with a request that is over."""
        metrics, record = self.metrics, context.record
        served = self.engine.served()
        models = (*served.names, *served.adapters)
        metrics.count_request(record, models)
        if record.route in _TIMED and outcome_of(record) == "ok":
            metrics.count_time(record)
        if record.uses and (record.status or _ERROR_STATUS) < _ERROR_STATUS:
            metrics.count_use(record, self._point_names(), context.meter.captured_bytes)
        _log_request(record)
        if span is not None:
            span.end(context, models)

    def _point_names(self) -> Collection[str]:
        """Return the kinds of points of the model; empty while no engine is ready."""
        if not self.engine.ready:
            return ()
        return {point.name for point in self.engine.capabilities().points}


def _headers(scope: Mapping[str, Any], request_id: str, span: RequestSpan | None) -> Headers:
    """Return headers for the response: the request's id (the client's own if ``scope`` has it), the trace."""
    sent_id = dict(scope.get("headers", ())).get(_REQUEST_ID, request_id.encode())
    trace_header = None if span is None else span.answer_header
    return [(_REQUEST_ID, sent_id), *([] if trace_header is None else [trace_header])]


def _log_request(record: Record) -> None:
    if _request_log.isEnabledFor(logging.INFO):
        _request_log.info("request", extra=_log_fields(record))


def _log_fields(record: Record) -> Mapping[str, Any]:
    return {
        **{name: getattr(record, name) for name in REQUEST_FIELDS if getattr(record, name)},
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "outcome": outcome_of(record),
        "error": record.error,
        "operations": record.operations,
        "duration_s": round(record.duration_s, 6),
        "request_bytes": record.request_bytes,
        "response_bytes": record.response_bytes,
    }
