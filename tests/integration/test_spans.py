"""OpenTelemetry spans of work that no request waits for, and of work in other processes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from app.request_context import RequestContext
from nnsight_engine.core.work_context import current_work
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest
from tests.collector import Collector, Span, collecting
from tests.integration.conftest import Serve
from tests.integration.scripted_traces import ScriptedEngine
from tests.integration.served_jobs import Jobs

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


class Noting(ScriptedEngine):
    """Notes which span the engine's own are to be below, and which line of the log they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.parents: list[str] = []
        self.trace_ids: list[str] = []

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        run = current_work()
        assert isinstance(run, RequestContext)
        self.parents.append(run.traceparent)
        self.trace_ids.append(run.record.trace_id)
        async with contextlib.aclosing(super().run_trace(request, job_id)) as frames:
            async for frame in frames:
                yield frame


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


async def test_each_run_of_a_job_is_a_span_linked_to_the_request_that_let_it(
    serve: Serve, collector: Collector
) -> None:
    engine = Noting()
    async with serve(traces={"vllm": engine}, otlp_endpoint=collector.url) as server:
        jobs = Jobs(server, engine)
        jobs.client.headers["traceparent"] = PARENT
        ended = await jobs.end(await jobs.submit("refused"))
        assert (await jobs.client.post(f"/v1/jobs/{ended.id}/rerun")).status_code == 202
        await jobs.end(ended.id)
        del jobs.client.headers["traceparent"]
        good = await jobs.end(await jobs.submit())
    # What was left was sent as the server ended.
    first, again, other = of_name(collector, "job")
    submits = of_name(collector, "POST /v1/jobs")
    (rerun,) = of_name(collector, "POST /v1/jobs/{job_id}/rerun")
    assert [span.linked for span in (first, again, other)] == [
        (f"{span.trace_id}-{span.span_id}",) for span in (submits[0], rerun, submits[1])
    ]
    assert {submits[0].trace_id, rerun.trace_id} == {TRACE_ID}
    assert TRACE_ID not in {first.trace_id, again.trace_id, other.trace_id}
    assert [told(span, "job_id", "job_status", "kind") for span in (first, other)] == [
        [ended.id, "ERROR", "code"], [good.id, "COMPLETED", "code"],
    ]  # fmt: skip
    assert first.attributes["error.type"] == "wrong_width"
    parents = [parent.split("-")[1:3] for parent in engine.parents]
    assert parents == [[span.trace_id, span.span_id] for span in (first, again, other)]
    assert engine.trace_ids == [span.trace_id for span in (first, again, other)]


def of_name(collector: Collector, name: str) -> list[Span]:
    """Return spans in the order in which they ended."""
    return [span for span in collector.spans if span.name == name]


def told(span: Span, *names: str) -> list[Any]:
    return [span.attributes[f"nnsight_engine.{name}"] for name in names]
