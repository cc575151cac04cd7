"""The front behind Ray Serve's own proxy, over servers with the fake engine: what ``serve deploy`` gives."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Collection, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import ray
from ray import serve
from typing_extensions import override
from websockets.sync.client import connect

from api_schemas.errors import ApiError
from app.cli import main
from app.main import create_app, new_store
from app.replicas.application import build, front_of, routing_of, scaling_of
from app.replicas.handles import ServedReplicas
from app.replicas.options import ModelOptions, ReplicaOptions
from app.replicas.replica import Replica
from app.settings import Settings
from benchmarks.servers import free_port
from nnsight_engine.core.errors import UnsupportedOptionError
from tests.fakes.engine import FakeBehaviour, FakeEngineClient
from tests.integration.live import listening
from tests.integration.scripted_traces import HEADERS, ScriptedEngine, trace
from tests.waiting import wait_for, wait_for_async

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.timeout(240)]

REPLICA: Final = "x-nnsight-replica"
LONG: Final = "once upon a time in a land far away there was a queen " * 8
_PROJECT: Final = Path(__file__).resolve().parents[2]


class StartedReplica(Replica):
    """A replica whose server, that of its rank, the test has started; its calls are the real ones."""

    async def __init__(self, urls: list[str]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        context = serve.get_replica_context()
        self._started = context.replica_id.unique_id, urls[context.rank.rank]
        self._num_leases = 0

    @override
    async def lease(
        self, key: bytes = b"", tried: Collection[str] = ()
    ) -> AsyncGenerator[tuple[str, str], None]:
        self._num_leases += 1
        try:
            async for address in super().lease(key, tried):
                yield address
        finally:
            self._num_leases -= 1

    @override
    async def address(self) -> tuple[str, str]:
        return self._started

    @override
    async def check_health(self) -> None: ...

    async def num_leases(self) -> int:
        return self._num_leases


class Served:
    """The front's address, and the engines behind it."""

    def __init__(self, url: str, engines: list[FakeEngineClient]) -> None:
        self.url = url
        self.engines = engines
        self.client = httpx.Client(base_url=url, timeout=30)
        self._replicas = serve.get_deployment_handle("replicas", "front")

    def complete(self, prompt: str = "a b", **body: Any) -> httpx.Response:
        answer = self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **body})
        assert answer.status_code == 200, answer.text
        return answer

    def num_leases(self) -> int:
        found: list[int] = self._replicas.broadcast("num_leases").results(timeout_s=60)
        return sum(found)

    def slow_down(self, delay_s: float) -> None:
        for one in self.engines:
            one.behaviour.delay_s = delay_s


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    settings = Settings.model_validate(
        {"result_dir": folder / "results", "data_dir": folder / "data", "drain_timeout_s": 1}
    )
    with contextlib.ExitStack() as stack:
        urls, engines = [], []
        for _ in range(2):
            store = new_store(settings)
            engine = FakeEngineClient(settings, store, FakeBehaviour())
            engine.traces = {"vllm": ScriptedEngine()}
            engines.append(engine)
            urls.append(stack.enter_context(listening(create_app(settings, engine, store))))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PYTHONPATH", str(_PROJECT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
        stack.callback(ray.shutdown)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        stack.callback(serve.shutdown)
        options = ReplicaOptions(models=[ModelOptions(model="fake")])
        replicas = serve.deployment(StartedReplica).options(
            name="replicas",
            num_replicas=2,
            max_ongoing_requests=100,
            ray_actor_options={"num_cpus": 0},
            request_router_config=routing_of(options),
        )
        serve.run(front_of(options, settings, [replicas.bind(urls)]), name="front")
        served = Served(f"http://127.0.0.1:{port}", engines)
        wait_for(lambda: served.client.get("/health/ready").status_code == 200)
        yield served
        served.client.close()


def test_requests_are_answered_and_counted_while_they_last(served: Served) -> None:
    assert served.complete().headers[REPLICA]
    assert served.client.get("/v1/models").json()["data"][0]["id"]
    refused = served.client.get("/v1/jobs/none")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "job_not_found")
    page = served.client.get("/metrics").text
    assert (
        len({line.split('replica="')[1].split('"')[0] for line in page.splitlines() if "replica=" in line})
        == 2
    )
    wait_for(lambda: served.num_leases() == 0)


def test_a_common_beginning_leads_to_one_replica_others_to_all(served: Served) -> None:
    first = served.complete(LONG).headers[REPLICA]
    assert {served.complete(f"{LONG}{number}").headers[REPLICA] for number in range(6)} == {first}
    assert len({served.complete(f"{number}{LONG}").headers[REPLICA] for number in range(20)}) == 2


def test_events_arrive_unbuffered_and_disconnects_end_requests(served: Served) -> None:
    served.slow_down(0.1)
    body = {"prompt": "a", "stream": True, "max_tokens": 2000}
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        assert next(answer.iter_lines())  # and the engine goes on
        assert sum(one.num_running for one in served.engines) == 1
        wait_for(lambda: served.num_leases() == 1)  # those of the requests before end in a while
    wait_for(lambda: not any(one.num_running for one in served.engines))
    wait_for(lambda: served.num_leases() == 0)
    served.slow_down(0)


def test_jobs_go_through_by_http_and_websocket(served: Served) -> None:
    answer = served.client.post("/v1/jobs", content=trace("print hello"), headers=HEADERS)
    assert answer.status_code in {200, 202}, answer.text
    job_id = answer.json()["id"]
    address = served.url.replace("http", "ws")
    with connect(f"{address}/v1/jobs/{job_id}/events?local=true") as socket_:
        events = [json.loads(message) for message in socket_]
    assert events[-1]["status"] == "COMPLETED"
    wait_for(lambda: served.num_leases() == 0)


def test_a_configuration_is_refused_without_keys(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNSIGHT_ENGINE_DATA_DIR", str(tmp_path))
    models = [{"model": "one", "max_replicas": 4}, {"model": "two", "arguments": ["-tp", "2"]}]
    with pytest.raises(UnsupportedOptionError, match="there are no keys"):
        build({"models": models})
    assert main(["keys", "create", "--tenant", "acme"]) == 0
    assert isinstance(build({"models": models, "host": "0.0.0.0"}), serve.Application)


async def test_leases_scale_replicas_and_find_those_that_are_wanted(served: Served) -> None:
    model = ModelOptions(
        model="fake", replicas=1, max_replicas=2, target_ongoing_requests=2, upscale_delay_s=0
    )
    scaling = {**scaling_of(model)["autoscaling_config"], "metrics_interval_s": 0.5, "look_back_period_s": 1}
    scaled = serve.deployment(StartedReplica).options(
        name="scaled",
        autoscaling_config=scaling,
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0},
        request_router_config=routing_of(ReplicaOptions(models=[model])),
    )
    application = scaled.bind(["http://one", "http://two"])
    handle = await asyncio.to_thread(serve.run, application, name="scaled", route_prefix=None)
    replicas = ServedReplicas(handle, 10)
    assert len(await replicas.addresses()) == 1
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(replicas.acquire())

        async def are_two() -> bool:
            return len(await replicas.addresses()) == 2

        await wait_for_async(are_two)
    one, other = await replicas.addresses()
    for _ in range(4):
        async with replicas.acquire(b"key", tried=[one.name]) as address:
            assert address == other
        async with replicas.acquire(b"key", tried=[other.name]) as address:
            assert address == one
    await asyncio.to_thread(serve.delete, "scaled")
    assert await replicas.addresses() == []
    with pytest.raises(ApiError) as caught:
        async with ServedReplicas(handle, 1).acquire():
            pass
    assert caught.value.code == "starting"
