"""The log and the spans: whose request each line and span is of, and nothing that clients have sent."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from api_schemas.administration import Scope
from api_schemas.errors import ApiError, ErrorCode
from app.audit import SAMPLING
from app.http.contexts import RequestContext
from app.observability.logs import engine_formatter, start_logs
from app.server.probes import EventLoopWatchdog
from app.settings import Settings
from nnsight_engine.core.work_context import current_work
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest
from tests.collector import Collector, Span, collecting
from tests.fakes.engine import FakeBehaviour
from tests.fakes.results import MODEL
from tests.integration.conftest import Serve
from tests.integration.scripted_traces import Jobs, ScriptedEngine
from tests.integration.tenants import Tenants
from tests.waiting import wait_for, wait_for_async

SECRET = "swordfish"
NUMBER = 31415.92653


class Log:
    """What was written since."""

    def __init__(self, stream: io.StringIO) -> None:
        self.stream = stream

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Everything that is logged, from ``DEBUG`` on, as JSON."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "")
    for name in ("app", "nnsight_engine", "uvicorn", "uvicorn.error"):
        # Servers of other tests may have had uvicorn's own configuration; and later ones get theirs back.
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(logging.getLogger("app.requests"), "filters", [])
    start_logs(Settings(log_format="json", log_level="DEBUG"))
    yield Log(stream)
    root.handlers[:] = handlers
    monkeypatch.undo()
    root.setLevel(level)  # which also clears what loggers remember of levels
    logging.captureWarnings(False)


async def test_each_request_has_a_line_with_whose_it_was(log: Log, tenants: Tenants) -> None:
    headers = await tenants.headers("acme")
    body = {"prompt": "a", "interventions": [{"op": "logit_lens"}]}
    answer = await tenants.send("POST", "/v1/completions", headers, json=body)
    (line,) = [line for line in log.lines if line["event"] == "request"]
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["tenant"] == "acme"
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["outcome"], line["operations"], line["level"]) == ("ok", ["logit_lens"], "info")
    assert line["duration_s"] > 0


async def test_what_is_logged_within_a_request_names_it_and_not_another(log: Log, serve: Serve) -> None:
    async with serve(FakeBehaviour(error=RuntimeError("broken"))) as server:
        answers = await asyncio.gather(*(server.complete() for _ in range(4)))
    errors = [line for line in log.lines if line["level"] == "error"]
    assert {line["request_id"] for line in errors} == {one.headers["x-request-id"] for one in answers}
    assert len(errors) == len(answers)
    assert errors[0]["exception"][0]["exc_value"] == "broken"


async def test_nothing_that_clients_send_is_logged(log: Log, tenants: Tenants) -> None:
    headers = await tenants.headers("acme", Scope.COMPLETIONS, Scope.INTERVENTIONS, Scope.CODE)
    key = headers["authorization"].removeprefix("Bearer ")
    steer = {"op": "steer", "at": "layers.1.output", "vector": [NUMBER] * 8}
    code = {"op": "trace", "code": f"x = '{SECRET}'"}
    bodies: list[Any] = [
        {"prompt": SECRET, "interventions": [steer]},
        {"prompt": SECRET, "stream": True},
        {"prompt": SECRET, "n": SECRET},
        {"prompt": SECRET, "interventions": [{**steer, "at": SECRET}]},
        {"prompt": SECRET, "interventions": [code]},
        {"prompt": {SECRET: SECRET}},
    ]
    behaviour = tenants.server.engine.behaviour
    failures = [None, ApiError(ErrorCode.ENGINE_CAPTURE_FULL, "full"), RuntimeError("broken")]
    for failure in failures:
        behaviour.error = behaviour.stream_error = failure
        for body in bodies:
            await tenants.send("POST", "/v1/completions", headers, json=body)
            chat = {**body, "messages": [{"role": "user", "content": SECRET}]}
            await tenants.send("POST", "/v1/chat/completions", headers, json=chat)
    await tenants.send("POST", "/v1/completions", headers, content=f'{{"prompt": "{SECRET}'.encode())
    await tenants.send("POST", "/v1/traces", {**headers, "content-type": "text/plain"}, content=b"swordfish")
    await tenants.send("POST", "/v1/completions", {"authorization": f"Bearer {key}x{SECRET}"}, json=bodies[0])
    await tenants.send("GET", f"/v1/models?{SECRET}", headers)
    assert len([line for line in log.lines if line["event"] == "request"]) == 3 * 2 * len(bodies) + 4
    for secret in (SECRET, key, str(NUMBER)):
        assert secret not in log.text


def test_uvicorn_s_and_other_loggers_go_the_same_way(log: Log) -> None:
    # Ray and vLLM give every record of the process fields of their own.
    foreign = {"color_message": "\x1b[1mone", "_ray_timestamp_ns": 1, "vllm_process_name": "APIServer"}
    said = {"msg": "one %s", "args": ("two",), "levelno": logging.WARNING, "levelname": "WARNING"}
    record = logging.makeLogRecord({"name": "uvicorn.error", **said, "url": "http://here", **foreign})
    logging.getLogger("uvicorn.error").handle(record)
    (line,) = log.lines
    assert line.pop("timestamp")
    assert line == {
        "event": "one two", "logger": "uvicorn.error", "level": "warning", "url": "http://here",
    }  # fmt: skip


@pytest.mark.parametrize("chosen", [None, "text", "json"])
def test_the_setting_alone_decides_on_the_format_of_all_loggers(
    monkeypatch: pytest.MonkeyPatch, log: Log, chosen: str | None
) -> None:
    monkeypatch.setattr(sys, "stderr", log.stream)  # which pytest has put back since
    if chosen is not None:
        monkeypatch.setenv("NNSIGHT_ENGINE_LOG_FORMAT", chosen)
    start_logs(Settings())
    logging.getLogger("app").warning("said")
    record = logging.makeLogRecord(
        {"name": "vllm.engine", "msg": "told", "levelno": 40, "levelname": "ERROR"}
    )
    lines = [log.text.strip(), engine_formatter().format(record)]
    assert [line.startswith("{") for line in lines] == [chosen == "json"] * 2
    assert ["said" in lines[0], "told" in lines[1]] == [True, True]


async def test_a_blocked_loop_is_one_sentence_and_its_stack_is_for_debugging(log: Log) -> None:
    watchdog, is_over = EventLoopWatchdog(None), threading.Event()

    async def watch() -> None:
        watching = asyncio.create_task(watchdog.watch())
        await asyncio.to_thread(is_over.wait)
        watching.cancel()

    watcher = threading.Thread(target=lambda: asyncio.run(watch()))
    beating = asyncio.create_task(watchdog.beat())
    await asyncio.sleep(0)
    watcher.start()
    wait_for(lambda: len(log.lines) == 2)  # blocks this loop
    await wait_for_async(lambda: len(log.lines) == 3)
    beating.cancel()
    is_over.set()
    await asyncio.to_thread(watcher.join)
    (sentence,) = [line["event"] for line in log.lines if line["level"] == "warning"]
    assert re.fullmatch(r"the event loop has been blocked for [\d.]+ s; requests wait", sentence)
    (stack,) = [line["event"] for line in log.lines if line["level"] == "debug"]
    assert "waiting.py" in stack


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


async def test_spans_of_generations_have_the_attributes_of_generative_ai(
    serve: Serve, collector: Collector
) -> None:
    async with serve(otlp_endpoint=collector.url) as server:
        # What a number in a body means is for the engine to say; the exporter knows those of 64 bits.
        sampling = {"temperature": 0.5, "top_p": "x", "seed": 2**80, "max_tokens": 3}
        await server.complete(prompt="one two", n=2, **sampling)
        await server.complete(model=SECRET, stream=True)
        await server.client.get("/v1/models")
    first, second = [ai_attributes(span) for span in of_name(collector, "POST /v1/completions")]
    assert first == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": MODEL, "gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 3,
        "gen_ai.request.choice.count": 2, "gen_ai.usage.input_tokens": 4, "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }  # fmt: skip
    assert second == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "other", "gen_ai.request.stream": True,
    }  # fmt: skip
    (listed,) = of_name(collector, "GET /v1/models")
    assert ai_attributes(listed) == {}
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    fields = {"n": "choice.count", "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens"}
    assert known >= {*first, *second, *(f"gen_ai.request.{fields.get(name, name)}" for name in SAMPLING)}


def ai_attributes(span: Span) -> dict[str, Any]:
    return {name: value for name, value in span.attributes.items() if name.startswith("gen_ai.")}


def of_name(collector: Collector, name: str) -> list[Span]:
    """Return spans in the order in which they ended."""
    return [span for span in collector.spans if span.name == name]


def told(span: Span, *names: str) -> list[Any]:
    return [span.attributes[f"nnsight_engine.{name}"] for name in names]
