"""Metrics, logs and traces of the real server: what operators see of real steps."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from nnsight_engine.modeling.bundled import BUNDLED_MODEL_NAME
from tests.collector import Collector, Span, collecting
from tests.e2e.server import Server
from tests.monitoring import OURS, Exposition, documented, expressions, named_in
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

PROMPT = "The Eiffel Tower is in the swordfish of"
STEER = {"op": "steer", "at": "layers.10.output", "vector": [1.25] * 576, "scale": 0.01}
HEADS = {"op": "capture", "at": "layers.3.attn.heads", "where": {"positions": [-1]}}
CODE = "hidden = model.layers[5].output[0].save()"
LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\[(debug|info|warning|error|critical) *\]")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[Server]:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "NNSIGHT_ENGINE_LOG_FORMAT": "json",
        "NNSIGHT_ENGINE_LOG_LEVEL": "INFO",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with Server(environment=environment) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=120) as found:
        yield found


def complete(client: httpx.Client, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    whole = {
        "model": BUNDLED_MODEL_NAME,
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        **body,
    }
    answer = client.post("/v1/completions", json=whole, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def look(client: httpx.Client) -> Exposition:
    time.sleep(1.1)  # the engine is asked once a second
    return Exposition(client.get("/metrics").raise_for_status().text)


def test_real_steps_are_counted_and_timed(client: httpx.Client) -> None:
    before = look(client)
    complete(client, stream=True)
    complete(client, stream=True, interventions=[STEER])
    complete(client, interventions=[HEADS])
    complete(client, interventions=[{"op": "trace", "code": CODE}])
    chat = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 4,
        "stream": True,
        "ignore_eos": True,
    }
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    after = before

    def grown(name: str, **labels: str) -> float:
        return after.value(f"{OURS}{name}", **labels) - before.value(f"{OURS}{name}", **labels)

    def are_counted() -> bool:
        nonlocal after
        after = look(client)
        return grown("interventions_total", op="trace", point="code") >= 1

    wait_for(are_counted)
    for tier, least in (("plain", 6), ("tap", 6), ("eager", 1)):
        assert grown("steps_total", tier=tier) >= least, tier
    with_interventions = grown("steps_total", tier="tap") + grown("steps_total", tier="eager")
    assert grown("step_intervention_seconds_count") == with_interventions
    assert 0 < grown("step_intervention_seconds_sum") < 30
    assert grown("interventions_total", op="steer", tier="tap", point="layers.*.output") == 1
    assert grown("interventions_total", op="capture", tier="eager", point="layers.*.attn.heads") == 1
    assert grown("interventions_total", op="trace", point="code") == 1
    assert grown("captured_bytes_total") > 576 * 2
    assert grown("cache_salted_requests_total", salt="writes") == 2
    completions, chats = "/v1/completions", "/v1/chat/completions"
    for route, kind, num_tokens in (
        (completions, "plain", 6), (completions, "operations", 6), (chats, "plain", 4),
    ):  # fmt: skip
        labels = {"route": route, "kind": kind}
        assert grown("time_to_first_token_seconds_count", **labels) == 1, labels
        assert grown("time_to_first_token_seconds_sum", **labels) > 0.005, labels
        # One that was not fetched in time comes with the next.
        assert 0 < grown("inter_token_seconds_count", **labels) <= num_tokens - 1, labels
        assert grown("request_seconds_count", **labels) >= 1, labels


def test_every_metric_that_dashboards_and_rules_name_is_served(client: httpx.Client) -> None:
    complete(client, stream=True)
    told = look(client)
    missing_attribute = {name for _, query in expressions() for name in named_in(query)} - told.sample_names
    assert missing_attribute == set()
    ours = {name for name in told.families if name.startswith(OURS)}
    assert ours == {name.removesuffix("_total") for name in documented()}


def test_one_trace_has_the_request_s_span_and_the_engine_s(
    client: httpx.Client, collector: Collector
) -> None:
    sent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    answer = complete(client, sent, interventions=[STEER])
    assert answer.headers["traceparent"].split("-")[1] == TRACE_ID
    wait_for(lambda: len(collector.of_trace(TRACE_ID)) >= 2)
    spans = {span.name: span for span in collector.of_trace(TRACE_ID)}
    ours, engine_s = spans["POST /v1/completions"], spans["llm_request"]
    assert (ours.parent_id, ours.service) == (PARENT_ID, "nnsight-engine")
    assert engine_s.parent_id == ours.span_id
    assert ours.attributes["http.response.status_code"] == 200
    assert ours.attributes["nnsight_engine.tier"] == "tap"
    assert ours.attributes["nnsight_engine.request_id"] == answer.headers["x-request-id"]
    usage = answer.json()["usage"]
    told = {name: value for name, value in ours.attributes.items() if name.startswith("gen_ai.")}
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == engine_s.attributes["gen_ai.usage.completion_tokens"] == 6
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert (told["gen_ai.operation.name"], told["gen_ai.request.temperature"]) == ("text_completion", 0)
    # The API finds a stop string, and the engine's own last output does not know of it.
    alone = complete(client, n=2, temperature=1, stop=[" "], stream=True).headers["traceparent"].split("-")[1]
    wait_for(lambda: len(collector.of_trace(alone)) >= 3)
    assert alone != TRACE_ID
    (ours,) = [span for span in collector.of_trace(alone) if span.name == ours.name]
    assert ours.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert ours.attributes["gen_ai.response.finish_reasons"] == ["stop", "stop"]

    def said(span: Span) -> str:
        return f"{span.name} {span.attributes}"

    assert not any("swordfish" in said(span) for span in collector.spans)


def test_all_lines_of_the_log_are_json_without_content(client: httpx.Client, server: Server) -> None:
    answer = complete(client, interventions=[STEER])
    client.post("/v1/completions", json={"prompt": PROMPT, "n": "swordfish"})
    client.post("/v1/completions", json={"prompt": PROMPT, "interventions": [{**STEER, "vector": [1.25]}]})
    request_id = answer.headers["x-request-id"]
    wait_for(lambda: request_id in server.whole_output())
    text = server.whole_output()
    # What vLLM's helpers say before they have read how, and native libraries, is neither the server's nor the
    # engine's: no line of these, which have a level and a time, is text.
    others = [line for line in text.splitlines() if not line.startswith("{")]
    assert not [line for line in others if LEVEL.search(line)]
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    (line,) = [one for one in lines if one.get("request_id") == request_id and one["event"] == "request"]
    assert line["trace_id"] == answer.headers["traceparent"].split("-")[1]
    assert (line["route"], line["operations"]) == ("/v1/completions", ["steer"])
    loggers = {str(one["logger"]).partition(".")[0] for one in lines}
    assert {"app", "vllm"} <= loggers
    (ready,) = [one for one in lines if one["logger"] == "app.commands.serve"]
    assert set(ready) == {"event", "level", "logger", "timestamp", "model", "url"}
    assert ready["event"] == "ready"
    assert "swordfish" not in text
    assert "1.25, 1.25" not in text


def test_a_server_that_is_killed_takes_its_engine_with_it(server: Server) -> None:
    """The last of this server."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    assert below
    server.process.kill()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []
