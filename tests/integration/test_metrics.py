"""``GET /metrics``: the counters, the absence of personal data, and answers in every state of the server."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter

from api_schemas.administration import Limits, Scope, Tier
from api_schemas.errors import ApiError, ErrorCode
from app.observability import scraping
from nnsight_engine.core.work_context import EngineCounts
from tests.fakes.engine import FakeBehaviour
from tests.fakes.results import MODEL
from tests.integration.command_server import STEPS, Process, started
from tests.integration.conftest import Serve, Server
from tests.integration.tenants import Tenants
from tests.monitoring import OURS, PROJECT, Exposition, documented, expressions, named_in
from tests.waiting import wait_for_async

COMPLETIONS = "/v1/completions"
STEER = {"op": "steer", "at": ["layers.1.output", "layers.2.output"], "vector": [1.0] * 8}
HOSTILE = 'evil"} 1\nnnsight_engine_up{x="\u202e'


async def look(server: Server, headers: dict[str, str] | None = None) -> Exposition:
    """Scrape a server as Prometheus does."""
    accept = {"accept": "application/openmetrics-text; version=x", **(headers or {})}
    response = await server.client.get("/metrics", headers=accept)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Exposition(response.text)


def counted(**changes: object) -> EngineCounts:
    counts = EngineCounts(steps=dict(STEPS))
    for name, value in changes.items():
        setattr(counts, name, value)
    return counts


def steps(told: Exposition) -> dict[str, float]:
    return {tier: told.value(f"{OURS}steps_total", tier=tier) for tier in STEPS}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "_PAUSE_S", 0)


async def test_the_documentation_lists_exactly_the_metrics_served(serve: Serve) -> None:
    async with serve() as server:
        families = (await look(server)).families
    found = {}
    for family in families.values():
        if family.name.startswith(OURS):
            found[f"{family.name}_total" if family.type == "counter" else family.name] = family.type
    assert found == {name: kind for name, (kind, _) in documented().items()}


async def test_labels_are_those_of_the_documentation_and_have_known_values(serve: Serve) -> None:
    async with serve() as server:
        await server.complete(stream=True, interventions=[STEER])
        await server.complete(model="x", prompt=3)
        told = await look(server)
    for family in told.families.values():
        if not family.name.startswith(OURS):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == documented()[name][1], sample
    rows = (PROJECT / "docs/monitoring.md").read_text()
    for label in set().union(*(labels for _, labels in documented().values())):
        assert f"`{label}`" in rows


def test_what_dashboards_and_rules_ask_for_is_in_the_documentation() -> None:
    parts = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    known = {f"{name}{part}" for name, (kind, _) in documented().items() for part in parts[kind]}
    asked = [(where, name) for where, query in expressions() for name in named_in(query)]
    assert len(asked) > 50
    assert [(where, name) for where, name in asked if name.startswith(OURS) and name not in known] == []


async def test_requests_are_counted_by_route_model_and_outcome(serve: Serve) -> None:
    name = f"{OURS}requests_total"
    async with serve() as server:
        for _ in range(3):
            await server.complete()
        await server.complete(model=MODEL)
        await server.complete(model="another")
        await server.client.get(f"/v1/jobs/{'x' * 32}")
        await server.client.get("/nowhere")
        server.engine.behaviour.error = ApiError(ErrorCode.ENGINE_CAPTURE_FULL, "full")
        await server.complete()
        server.engine.behaviour.error = RuntimeError("broken")
        await server.complete()
        told = await look(server)
    common = {"route": COMPLETIONS, "method": "POST", "tenant_class": "none"}
    assert told.value(name, **common, model=MODEL, outcome="ok") == 4
    assert told.value(name, **common, model="other", outcome="refused") == 1
    assert told.value(name, **common, outcome="busy") == 1
    assert told.value(name, **common, outcome="failed") == 1
    assert told.value(name, route="/v1/jobs/{job_id}", method="GET", model="", outcome="refused") == 1
    assert told.value(name, route="other", outcome="refused") == 1
    reasons = f"{OURS}rejected_total"
    for reason in ("model_not_found", "job_not_found", "not_found", "engine_capture_full", "internal_error"):
        assert told.value(reasons, reason=reason) == 1, reason


async def test_a_stream_that_fails_or_is_left_has_not_gone_well(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "_TIMEOUT_S", 0.05)
    behaviour = FakeBehaviour(stream_error=RuntimeError("broken"))
    async with serve(behaviour) as server:
        assert (await server.complete(stream=True)).status_code == 200
        told = await look(server)
        assert told.value(f"{OURS}requests_total", route=COMPLETIONS, outcome="failed") == 1
        assert told.value(f"{OURS}request_seconds_count", route=COMPLETIONS) == 0
        behaviour.stream_error, behaviour.delay_s = None, 3600.0
        asking = asyncio.create_task(server.complete(stream=True))
        await wait_for_async(lambda: server.engine.num_running > 0)
        assert (await look(server)).value(f"{OURS}in_flight") == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await server.until_idle()
        told = await look(server)
        assert told.value(f"{OURS}requests_total", route=COMPLETIONS, outcome="client_left") == 1
        assert told.value(f"{OURS}in_flight") == 0


async def test_the_first_token_is_one_with_text_and_each_later_one_is_timed(serve: Serve) -> None:
    delay_s, num_tokens = 0.03, 6
    async with serve(FakeBehaviour(delay_s=delay_s)) as server:
        usage = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": num_tokens}
        await server.complete(**usage)
        await server.complete(**usage, interventions=[STEER])
        await server.complete(**usage, n=2)
        await server.complete(max_tokens=num_tokens)
        told = await look(server)
    for kind in ("plain", "operations"):
        labels = {"route": COMPLETIONS, "kind": kind}
        num_streams = 2 if kind == "plain" else 1  # those of two choices have a first token too
        first, between = f"{OURS}time_to_first_token_seconds", f"{OURS}inter_token_seconds"
        assert told.value(f"{first}_count", **labels) == num_streams
        assert told.value(f"{between}_count", **labels) == num_tokens - 1
        assert told.value(f"{first}_sum", **labels) >= num_streams * delay_s
        assert told.value(f"{between}_sum", **labels) >= (num_tokens - 1) * delay_s
    assert told.value(f"{OURS}request_seconds_count", route=COMPLETIONS, kind="plain") == 3


async def test_interventions_are_counted_by_operation_point_and_tier(serve: Serve) -> None:
    lens = {"op": "logit_lens"}
    capture = {"op": "capture", "at": "layers.*.output"}
    async with serve() as server:
        for _ in range(2):
            assert (await server.complete(interventions=[STEER, lens, capture], n=3)).status_code == 200
        refused = await server.complete(interventions=[{**STEER, "mode": "sideways"}])
        assert refused.status_code == 422
        told = await look(server)
    name = f"{OURS}interventions_total"
    for op in ("steer", "logit_lens", "capture"):
        assert told.value(name, op=op, tier="tap", point="layers.*.output") == 2, op
    assert told.value(name) == 6
    assert told.value(f"{OURS}captured_bytes_total") > 0
    salts = f"{OURS}cache_salted_requests_total"
    assert told.value(salts, salt="writes") == 2


async def test_salts_are_distinguished(tenants: Tenants) -> None:
    headers = await tenants.headers("acme")
    bodies: list[dict[str, Any]] = [
        {}, {"cache_salt": "mine"}, {"interventions": [STEER]}, {"interventions": []},
    ]  # fmt: skip
    for body in bodies:
        answer = await tenants.send("POST", COMPLETIONS, headers, json={"prompt": "a", **body})
        assert answer.status_code == 200, answer.text
    told = await look(tenants.server, await tenants.headers("operator", Scope.METRICS))
    salts = f"{OURS}cache_salted_requests_total"
    found = {salt: told.value(salts, salt=salt) for salt in ("none", "tenant", "client", "writes")}
    assert found == {"none": 0, "tenant": 2, "client": 1, "writes": 1}


async def test_what_the_engine_counts_grows_also_over_its_restarts(serve: Serve, at_once: None) -> None:
    counts = counted(sandboxes={"started": 3, "killed": 1, "refused": 0})
    for seconds in (0.0002, 0.0002, 0.5, 99.0):
        counts.note_time(seconds)
    async with serve(FakeBehaviour(counts=counts)) as server, serve() as other:
        told = await look(server)
        assert steps(told) == STEPS
        assert told.value(f"{OURS}sandboxes_total", event="started") == 3
        spent = f"{OURS}step_intervention_seconds"
        assert told.value(f"{spent}_count") == 4
        assert told.value(f"{spent}_sum") == pytest.approx(99.5004)
        assert told.value(f"{spent}_bucket", le="0.00025") == 2
        assert told.value(f"{spent}_bucket", le="+Inf") == 4
        assert steps(await look(other)) == dict.fromkeys(STEPS, 0)
        server.engine.behaviour.counts = counted(steps={"plain": 9, "tap": 5, "eager": 2})
        assert steps(await look(server)) == {**STEPS, "plain": 9}
        server.engine.behaviour.counts = counted(steps={"plain": 1, "tap": 0, "eager": 0})  # another engine
        assert steps(await look(server)) == {**STEPS, "plain": 10}


async def test_the_process_s_own_metrics_and_vllm_s_stand_beside_ours(serve: Serve) -> None:
    counter = Counter("vllm:made_up", "As vLLM registers its own.", registry=REGISTRY)
    try:
        counter.inc(3)
        async with serve() as server:
            told = await look(server)
            assert told.value("vllm:made_up_total") == 3
            assert told.value("process_open_fds") > 0
    finally:
        REGISTRY.unregister(counter)


async def test_the_engine_is_queried_once_for_concurrent_scrapes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "_PAUSE_S", 3600)
    async with serve(FakeBehaviour(counts=counted(), delay_s=0.05)) as server:
        seen = await asyncio.gather(*(look(server) for _ in range(8)))
        assert [steps(told) for told in (*seen, await look(server))] == [STEPS] * 9
        assert server.engine.num_counted == 1


async def test_there_are_metrics_whatever_becomes_of_the_engine(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    monkeypatch.setattr(scraping, "_TIMEOUT_S", 0.05)

    def phases(told: Exposition) -> list[str]:
        every = ("starting", "ready", "restarting", "draining", "dead")
        return [phase for phase in every if told.value(f"{OURS}phase", phase=phase)]

    async with serve(FakeBehaviour(counts=counted(), is_starting=True)) as server:
        told = await look(server)
        assert (phases(told), steps(told)) == (["starting"], dict.fromkeys(STEPS, 0))
        assert server.engine.num_counted == 0
        behaviour = server.engine.behaviour
        behaviour.is_starting = False
        told = await look(server)
        assert (phases(told), steps(told)) == (["ready"], STEPS)
        behaviour.count_error = RuntimeError("it died")
        assert steps(await look(server)) == STEPS
        behaviour.count_error, behaviour.delay_s = None, 3600.0  # in the middle of a long step
        assert steps(await look(server)) == STEPS
        behaviour.is_dead = True
        told = await look(server)
        assert (phases(told), steps(told)) == (["restarting"], STEPS)
    # And the server ends, though it has an answer to wait for.


async def test_metrics_have_jobs_by_status_and_stores_by_bytes(with_jobs: Any, at_once: None) -> None:
    async with with_jobs(max_running_jobs=1, job_store_bytes=12345678) as jobs:
        await jobs.end(await jobs.submit())

        async def is_counted() -> bool:
            return (await look(jobs.server)).value(f"{OURS}jobs_ended_total", status="completed") == 1

        await wait_for_async(is_counted)
        told = await look(jobs.server)
        assert told.value(f"{OURS}jobs", status="completed") == 1
        assert told.value(f"{OURS}stored_bytes_limit", store="jobs") == 12345678
        assert 0 < told.value(f"{OURS}stored_bytes", store="jobs") < 1 << 20


async def test_hostile_values_never_become_labels(tenants: Tenants) -> None:
    """Whatever clients write: each label has one of few values, and no tenant's name is told."""
    acme = await tenants.headers("acme-secret", tier=Tier.SANDBOXED, limits=Limits(requests_per_minute=10))
    op = {"op": "capture", "at": "layers.1.evil_leaf"}
    monitor = await tenants.headers("operator", Scope.METRICS)
    before = len((await look(tenants.server, monitor)).text.splitlines())
    for number in range(6):
        evil = f"{HOSTILE}{number}"
        body = {"prompt": evil, "model": evil, "interventions": [op], "user": evil}
        await tenants.send("POST", COMPLETIONS, acme, json=body)
        await tenants.send("POST", COMPLETIONS, acme, json={**body, "model": MODEL, "cache_salt": evil})
        await tenants.send("POST", COMPLETIONS, {"authorization": f"Bearer evil{number}"}, json=body)
        await tenants.send("GET", f"/evil{number}/path", acme)
        await tenants.send("GET", f"/v1/jobs/evil{number}", acme)
        await tenants.send(f"EVIL{number}", "/v1/models", acme)
        await tenants.send("POST", COMPLETIONS, acme, content=b"evil" * 9)
        await tenants.send("POST", f"{COMPLETIONS}?evil={number}", {**acme, "traceparent": evil[:4]})
    told = await look(tenants.server, monitor)
    assert "evil" not in told.text
    assert "acme" not in told.text
    assert told.values(f"{OURS}requests_total", "tenant_class") == {"none", "sandboxed", "trusted"}
    assert told.values(f"{OURS}requests_total", "model") == {"", MODEL, "other"}
    assert told.values(f"{OURS}requests_total", "method") <= {"GET", "POST", "other"}
    assert told.values(f"{OURS}interventions_total", "point") == {"other"}
    again = len(told.text.splitlines())
    for number in range(6, 12):
        await tenants.send("POST", COMPLETIONS, acme, json={"prompt": "a", "model": f"evil{number}"})
        await tenants.send("GET", f"/evil{number}", acme)
    assert len((await look(tenants.server, monitor)).text.splitlines()) == again > before


async def test_several_processes_report_their_sum(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()

    async def told(server: Process) -> Exposition:
        return Exposition((await server.client.get("/metrics")).text)

    together = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    async with started(tmp_path / "1", **together) as first, started(tmp_path / "2", **together) as second:
        for server, times in ((first, 2), (second, 3)):
            await wait_for_async(server.ready)
            for _ in range(times):
                await server.stream({"prompt": "a b", "max_tokens": 3, "stream": True})
            await told(server)
        for server in (first, second):
            found = await told(server)
            assert found.value(f"{OURS}requests_total", route=COMPLETIONS, outcome="ok") == 5
            assert found.value(f"{OURS}time_to_first_token_seconds_count") == 5
            assert found.value(f"{OURS}inter_token_seconds_count") == 10
            assert found.value(f"{OURS}phase", phase="ready") == 2
            assert found.value(f"{OURS}steps_total", tier="plain") == 2 * STEPS["plain"]
            assert found.value(f"{OURS}stored_bytes_limit", store="jobs") == 20 * 2**30
        second.process.send_signal(signal.SIGTERM)
        await second.ended()
        left = await told(first)
        assert left.value(f"{OURS}requests_total", route=COMPLETIONS, outcome="ok") == 5
        assert left.value(f"{OURS}phase", phase="ready") == 1
