"""``GET /metrics``: counted, spared to the engine, and there whatever state that is in."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import REGISTRY, Counter
from prometheus_client.parser import text_string_to_metric_families

from api_schemas.keys import Scope
from app.engine.fake import FakeBehaviour
from app.services import metrics
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.tenants import Tenants

STEPS = "nnsight_engine_steps"
COUNTED = {"plain": 7, "tap": 5, "eager": 2}


async def steps_of(server: Server) -> dict[str, float]:
    """Scrape a server as Prometheus does."""
    response = await server.client.get(
        "/metrics", headers={"accept": "application/openmetrics-text; version=x"}
    )
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families[STEPS].type == "counter"
    samples = families[STEPS].samples
    assert {sample.name for sample in samples} <= {f"{STEPS}_total"}
    return {sample.labels["tier"]: sample.value for sample in samples}


async def test_steps_are_told_by_tier_beside_the_processes_own_metrics(serve: Serve) -> None:
    counter = Counter("vllm:made_up", "As vLLM registers its own.", registry=REGISTRY)
    try:
        counter.inc(3)
        async with serve(FakeBehaviour(num_steps=COUNTED)) as server, serve() as other:
            assert await steps_of(server) == COUNTED
            assert "vllm:made_up_total 3.0" in (await server.client.get("/metrics")).text
            assert await steps_of(other) == dict.fromkeys(COUNTED, 0)
    finally:
        REGISTRY.unregister(counter)


async def test_the_engine_is_asked_once_for_all_who_look(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_PAUSE_S", 3600)
    async with serve(FakeBehaviour(num_steps=COUNTED, delay_s=0.05)) as server:
        seen = await asyncio.gather(*(steps_of(server) for _ in range(8)))
        assert [*seen, await steps_of(server)] == [COUNTED] * 9
        assert server.engine.num_counted == 1
        monkeypatch.setattr(metrics, "_PAUSE_S", 0)
        server.engine.behaviour.num_steps = {**COUNTED, "tap": 6}
        assert (await steps_of(server))["tap"] == 6


async def test_there_are_metrics_whatever_becomes_of_the_engine(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_PAUSE_S", 0)
    monkeypatch.setattr(metrics, "_PATIENCE_S", 0.05)
    async with serve(FakeBehaviour(num_steps=COUNTED, is_starting=True)) as server:
        assert await steps_of(server) == {}
        assert server.engine.num_counted == 0
        behaviour = server.engine.behaviour
        behaviour.is_starting = False
        assert await steps_of(server) == COUNTED
        behaviour.count_error = RuntimeError("it died")
        assert await steps_of(server) == COUNTED
        behaviour.count_error, behaviour.delay_s = None, 3600.0  # in the middle of a long step
        assert await steps_of(server) == COUNTED
        behaviour.is_dead = True
        assert await steps_of(server) == COUNTED
    # And the server ends, though it has an answer to wait for.


async def test_where_there_are_keys_there_is_one_for_monitoring(
    tenants: Tenants, error_of: ErrorCheck
) -> None:
    error_of(await tenants.send("GET", "/metrics"), 401, "missing_api_key")
    acme = await tenants.headers("acme", Scope.COMPLETIONS, Scope.INTERVENTIONS, Scope.CODE)
    error_of(await tenants.send("GET", "/metrics", acme), 403, "missing_scope")
    monitor = await tenants.headers("operator", Scope.METRICS)
    told = await tenants.send("GET", "/metrics", monitor)
    assert STEPS in told.text
    assert "acme" not in told.text
    error_of(await tenants.send("GET", "/v1/admin/keys", monitor), 403, "missing_scope")
    error_of(
        await tenants.send("POST", "/v1/completions", monitor, json={"prompt": "a"}), 403, "missing_scope"
    )
