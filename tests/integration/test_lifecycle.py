"""Starting, ready, draining, dead: what each phase answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import httpx
import pytest

from app.http.lifecycle import Lifecycle, Phase, Restarts
from app.main import create_app, new_store
from app.settings import Settings
from tests.fakes.engine import FakeBehaviour, FakeEngineClient
from tests.integration.conftest import ErrorCheck, Serve
from tests.integration.scripted_traces import HEADERS, answered, message
from tests.waiting import wait_for_async


class Mortal(FakeEngineClient):
    """An engine that lives for so long, and can be started so often."""

    def __init__(self, *, lives_s: float, num_starts: int = 100) -> None:
        settings = Settings()
        super().__init__(settings, new_store(settings))
        self.starts: list[float] = []
        self._lives_s, self._left = lives_s, num_starts

    async def start(self) -> None:
        self.starts.append(time.monotonic())
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("no memory")
        await super().start()

    async def died(self) -> None:
        await asyncio.sleep(self._lives_s)
        self.behaviour.is_dead = True


API_PATHS = ["/v1/models", "/v1/capabilities", "/v1/results/x", "/v1/nowhere"]


async def test_while_starting_the_port_answers_and_the_api_says_wait(serve: Serve, error_of: ErrorCheck):
    async with serve(FakeBehaviour(is_starting=True)) as server:
        assert (await server.client.get("/health/live")).json() == {"status": "starting"}
        error_of(await server.client.get("/health/ready"), 503, "starting")
        for response in [await server.complete(), *[await server.client.get(path) for path in API_PATHS]]:
            error_of(response, 503, "starting")
            assert int(response.headers["retry-after"]) > 0
        server.engine.behaviour.is_starting = False
        assert (await server.client.get("/health/ready")).json() == {"status": "ready"}
        assert (await server.complete()).status_code == 200


async def test_draining_refuses_new_work_and_finishes_the_old(serve: Serve, error_of: ErrorCheck):
    async with serve(FakeBehaviour(delay_s=0.02), inline_tensor_bytes=1) as server:
        capture = [{"op": "capture", "at": "layers.1.output"}]
        running = asyncio.create_task(server.complete(stream=True, max_tokens=5, interventions=capture))
        await wait_for_async(lambda: server.engine.num_running == 1)
        server.context.lifecycle.begin_drain()
        error_of(await server.complete(), 503, "draining")
        error_of(await server.client.get("/health/ready"), 503, "draining")
        assert (await server.client.get("/health/live")).json() == {"status": "draining"}
        response = await running
        assert response.text.endswith("data: [DONE]\n\n")
        # What the last answers point at can still be fetched.
        url = response.text.split('"url":"')[1].split('"')[0]
        assert (await server.client.get(url)).status_code == 200


async def test_requests_that_the_shutdown_does_not_wait_for_get_an_error(serve: Serve, error_of: ErrorCheck):
    async with serve(FakeBehaviour(delay_s=0.05)) as server:
        server.engine.fake_traces.behaviour.hangs = True
        stream = asyncio.create_task(server.complete(stream=True, max_tokens=2000))
        trace = asyncio.create_task(server.client.post("/v1/traces", content=message(), headers=HEADERS))
        await wait_for_async(
            lambda: server.engine.num_running == 1 and server.engine.fake_traces.num_running == 1
        )
        await asyncio.sleep(0.3)  # some of the stream's tokens
        server.engine.behaviour.delay_s = 60
        whole = asyncio.create_task(server.complete())
        await wait_for_async(lambda: server.context.lifecycle.num_in_flight == 3)
        await asyncio.wait_for(server.context.lifecycle.drain(0.1), 50)
        assert server.context.lifecycle.num_in_flight == 0
        assert server.engine.num_running == server.engine.fake_traces.num_running == 0
        error_of(await whole, 503, "draining")
        assert int((await whole).headers["retry-after"]) > 0
        *_, failure, done, end = (await stream).text.split("\n\n")
        assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "draining"
        assert (done, end) == ("data: [DONE]", "")
        assert answered(await trace)[-1].json()["error"]["code"] == "draining"


async def test_a_request_that_takes_too_long_is_ended(serve: Serve, error_of: ErrorCheck):
    async with serve(FakeBehaviour(delay_s=0.02), request_timeout_s=0.5) as server:
        response = await server.complete(stream=True, max_tokens=2000)
        events = response.text.removesuffix("data: [DONE]\n\n").split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "request_timed_out"
        assert len(events) > 3
        server.engine.behaviour.delay_s = 60
        error_of(await server.complete(), 504, "request_timed_out")
        server.engine.fake_traces.behaviour.hangs = True
        trace = await server.client.post("/v1/traces", content=message(), headers=HEADERS)
        assert answered(trace)[-1].json()["error"]["code"] == "request_timed_out"
        assert server.engine.num_running == server.engine.fake_traces.num_running == 0


async def test_an_engine_that_dies_is_started_again(
    serve: Serve, error_of: ErrorCheck, monkeypatch: pytest.MonkeyPatch
):
    async with serve(engine_restart_delay_s=0.01) as server:
        may_start, start = asyncio.Event(), server.engine.start

        async def start_later() -> None:
            await may_start.wait()
            await start()

        monkeypatch.setattr(server.engine, "start", start_later)
        for number in (1, 2):
            may_start.clear()
            server.engine.behaviour.is_dead = True
            error_of(await server.complete(), 503, "engine_restarting")
            refused = await server.client.get("/health/ready")
            error_of(refused, 503, "engine_restarting")
            assert int(refused.headers["retry-after"]) > 0
            assert (await server.client.get("/health/live")).json() == {"status": "restarting"}
            may_start.set()
            await wait_for_async(lambda: server.context.lifecycle.phase is Phase.READY)
            assert (await server.complete()).status_code == 200
            assert server.engine.num_starts == number + 1
            scraped = (await server.client.get("/metrics")).text
            assert f"nnsight_engine_engine_restarts_total {number}.0" in scraped


async def test_each_death_in_a_row_is_waited_for_twice_as_long():
    engine = Mortal(lives_s=0)
    failures: list[float] = []
    lifecycle = Lifecycle(engine, lambda _: failures.append(time.monotonic()), Restarts(3, 60, 0.05))
    lifecycle.start()
    await wait_for_async(lambda: bool(failures))
    pauses = [after - before for before, after in itertools.pairwise(engine.starts)]
    assert len(pauses) == 3
    assert all(pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.2), strict=True))
    assert lifecycle.phase is Phase.DEAD
    assert lifecycle.num_restarts == 3
    await lifecycle.close()
    # Those that lie far enough apart are no row.
    engine = Mortal(lives_s=0.1)
    lifecycle = Lifecycle(engine, None, Restarts(1, 0.05, 0.01))
    lifecycle.start()
    await wait_for_async(lambda: lifecycle.num_restarts == 4)
    assert lifecycle.phase is not Phase.DEAD
    await lifecycle.close()


async def test_an_engine_that_cannot_be_started_again_is_given_up():
    engine = Mortal(lives_s=0.01, num_starts=1)
    failures: list[bool] = []
    lifecycle = Lifecycle(engine, lambda _: failures.append(True), Restarts(2, 60, 0.01))
    lifecycle.start()
    await wait_for_async(lambda: bool(failures))
    assert (len(engine.starts), lifecycle.phase, failures) == (3, Phase.DEAD, [True])
    await lifecycle.close()


async def test_a_dead_engine_is_said_so_everywhere(serve: Serve, error_of: ErrorCheck):
    async with serve(max_engine_restarts=0) as server:
        assert (await server.complete()).status_code == 200
        server.engine.behaviour.is_dead = True
        await wait_for_async(lambda: server.context.lifecycle.phase is Phase.DEAD)
        error_of(await server.complete(), 503, "engine_dead")
        error_of(await server.client.get("/v1/models"), 503, "engine_dead")
        error_of(await server.client.get("/health/ready"), 503, "engine_dead")
        error_of(await server.client.get("/health/live"), 503, "engine_dead")


async def test_an_engine_that_does_not_start_is_dead_and_reported_once(
    tmp_path: object, error_of: ErrorCheck, caplog: pytest.LogCaptureFixture
):
    settings = Settings.model_validate({"result_dir": tmp_path})
    store = new_store(settings)
    engine = FakeEngineClient(settings, store, FakeBehaviour(start_error=RuntimeError("no such model")))
    reports: list[str] = []
    app = create_app(settings, engine, store, on_engine_failure=reports.append)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        await wait_for_async(lambda: bool(reports))
        error_of(await client.get("/health/live"), 503, "engine_dead")
        error_of(await client.get("/v1/models"), 503, "engine_dead")
    assert reports == ["the engine did not start; its error is above"]
    assert "no such model" in caplog.text
