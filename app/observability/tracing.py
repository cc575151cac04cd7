"""OpenTelemetry spans for API requests and runs of jobs, continued by the engine.

A client's ``traceparent`` is continued. A job may run hours later, on another server, and more than once:
each run is a trace of its own, linked to the request. vLLM exports a child span for each prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import StatusCode
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import Scope

from api_schemas.jobs import JobStatus
from app.audit import Record
from app.http.contexts import RequestContext
from app.http.vllm_routes import MESSAGES, RESPONSES
from app.observability.metrics import OTHER, kind_of
from app.settings import Settings, otlp_traces_endpoint
from nnsight_engine import __version__

_GRPC: Final = "grpc"
_PROVIDER: Final = "vllm"
_GENERATIONS: Final = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    MESSAGES: "chat",
    RESPONSES: "chat",
    "/v1/embeddings": "embeddings",
}
"""The values of ``gen_ai.operation.name``, by route."""
_FIELDS: Final = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n": "choice.count",
}
"""Fields of a request whose attribute has another name than ``gen_ai.request.FIELD``."""
_SERVER_ERROR: Final = 500
_SHUTDOWN_TIMEOUT_S: Final = 3.0
_TRACEPARENT: Final = "traceparent"


class RequestSpan:
    def __init__(self, span: Span, headers: dict[str, str]) -> None:
        self._span = span
        self.headers = headers

    @property
    def answer_header(self) -> tuple[bytes, bytes] | None:
        """The response header with the trace's id; None if the SDK is disabled."""
        traceparent = self.headers.get(_TRACEPARENT)
        return None if traceparent is None else (_TRACEPARENT.encode(), traceparent.encode())

    def end(self, context: RequestContext, models: Sequence[str]) -> None:
        """End the span with the attributes of a request that is over; ``models`` are the served names."""
        record = context.record
        route = record.route or "unknown"
        self._span.update_name(f"{record.method} {route}")
        self._span.set_attributes(
            {
                "http.request.method": record.method,
                "http.route": route,
                "http.response.status_code": record.status or 0,
                **_common_attributes(record),
                **_generation_attributes(context, models),
            }
        )
        if (record.status or _SERVER_ERROR) >= _SERVER_ERROR:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class JobSpan:
    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, record: Record, ended: JobStatus | None) -> None:
        """End the span with attributes of the run; ``ended`` is None if the job is going to run again."""
        self._span.set_attributes(
            {
                "nnsight_engine.job_id": record.subject,
                "nnsight_engine.job_status": "" if ended is None else ended.value,
                **_common_attributes(record),
            }
        )
        if ended is JobStatus.ERROR:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def _common_attributes(record: Record) -> dict[str, str | list[str]]:
    return {
        "nnsight_engine.request_id": record.request_id,
        "nnsight_engine.tenant": record.tenant,
        "nnsight_engine.kind": kind_of(record.operations),
        "nnsight_engine.operations": record.operations,
        "nnsight_engine.tier": record.step_tier,
        "error.type": record.error,
    }


def _generation_attributes(context: RequestContext, models: Sequence[str]) -> dict[str, AttributeValue]:
    """Return the attributes of OpenTelemetry's conventions for generative AI; none for other routes."""
    record, meter = context.record, context.meter
    if record.route not in _GENERATIONS:
        return {}
    model = record.model or models[0]
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _GENERATIONS[record.route],
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": model if model in models else OTHER,
    }
    attributes |= {
        f"gen_ai.request.{_FIELDS.get(name, name)}": value for name, value in record.sampling.items()
    }
    if meter.prompt_tokens:  # the model ran
        attributes["gen_ai.usage.input_tokens"] = meter.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = meter.output_tokens
    if meter.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = meter.finish_reasons
    return attributes


class Tracing:
    def __init__(self, endpoint: str, protocol: str) -> None:
        exporter = GrpcExporter(endpoint=endpoint) if protocol == _GRPC else HttpExporter(endpoint=endpoint)
        resource = Resource.create({"service.name": "nnsight-engine", "service.version": __version__})
        # A provider of this server alone: vLLM uses the process's global one.
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("nnsight_engine", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope, context: RequestContext) -> RequestSpan:
        """Begin the span of a request, as a child of the client's if that sent a ``traceparent``."""
        parent = self._propagator.extract(Headers(scope=scope), context=Context())
        span = self._tracer.start_span("request", parent, SpanKind.SERVER)
        return RequestSpan(span, self._propagate(span, context))

    def begin_job(self, context: RequestContext, traceparent: str) -> JobSpan:
        """Begin the span of a job's run; ``traceparent`` is its request's, empty if that had none."""
        parent = self._propagator.extract({_TRACEPARENT: traceparent}, context=Context())
        parent_context = get_current_span(parent).get_span_context()
        links = [Link(parent_context)] if parent_context.is_valid else []
        span = self._tracer.start_span("job", Context(), SpanKind.CONSUMER, links=links)
        self._propagate(span, context)
        return JobSpan(span)

    def _propagate(self, span: Span, context: RequestContext) -> dict[str, str]:
        """Put the span into the context, for the log and the engine; return its headers."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, set_span_in_context(span, Context()))
        context.record.trace_id = format_trace_id(span.get_span_context().trace_id)
        context.trace_headers = headers
        return headers

    def close(self) -> None:
        """Export the remaining spans, waiting for the collector a few seconds at most."""
        ending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(_SHUTDOWN_TIMEOUT_S)


def tracing_of(settings: Settings) -> Tracing | None:
    endpoint = otlp_traces_endpoint(settings)
    return Tracing(endpoint, settings.otlp_protocol) if endpoint else None
