"""A collector of OpenTelemetry traces: takes what exporters send over HTTP, and keeps the spans."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclasses.dataclass(frozen=True)
class Span:
    """A span that came; of those that it is linked to, the ids of trace and span."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    attributes: dict[str, Any]
    linked: tuple[str, ...] = ()


class Collector:
    """The spans that came so far.

    Attributes:
        url: What exporters are given.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []

    def take(self, body: bytes) -> None:
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(of_resource.resource.attributes).get("service.name", "")
            for of_scope in of_resource.scope_spans:
                self.spans += [
                    Span(
                        span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                        service, _values(span.attributes),
                        tuple(f"{link.trace_id.hex()}-{link.span_id.hex()}" for link in span.links),
                    )
                    for span in of_scope.spans
                ]  # fmt: skip

    def of_trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    found = getattr(value, value.WhichOneof("value") or "string_value")
    return [_value(one) for one in found.values] if value.HasField("array_value") else found


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Listen on a free port for the length of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                collector.take(body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
