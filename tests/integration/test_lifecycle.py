"""Starting, ready, draining, dead: what each phase answers."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from app.engine.fake import FakeBehaviour, FakeEngineClient
from app.main import create_app, new_store
from app.settings import Settings
from tests.integration.conftest import ErrorCheck, Serve

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
        await asyncio.sleep(0.01)
        server.context.lifecycle.begin_drain()
        error_of(await server.complete(), 503, "draining")
        error_of(await server.client.get("/health/ready"), 503, "draining")
        assert (await server.client.get("/health/live")).json() == {"status": "draining"}
        response = await running
        assert response.text.endswith("data: [DONE]\n\n")
        # What the last answers point at can still be fetched.
        url = response.text.split('"url": "')[1].split('"')[0]
        assert (await server.client.get(url)).status_code == 200


async def test_shutdown_waits_for_running_requests_and_then_closes_the_engine(serve: Serve):
    async with serve(FakeBehaviour(delay_s=0.02)) as server:
        running = asyncio.create_task(server.complete(stream=True, max_tokens=5))
        await asyncio.sleep(0.01)
    assert (await running).text.endswith("data: [DONE]\n\n")
    assert not server.engine.alive


async def test_shutdown_does_not_wait_forever(serve: Serve, caplog: pytest.LogCaptureFixture):
    async with asyncio.timeout(5):
        async with serve(FakeBehaviour(delay_s=60), drain_timeout_s=0.05) as server:
            running = asyncio.create_task(server.complete())
            await asyncio.sleep(0.01)
    assert "1 requests in flight" in caplog.text
    running.cancel()


async def test_a_dead_engine_is_said_so_everywhere(serve: Serve, error_of: ErrorCheck):
    async with serve() as server:
        assert (await server.complete()).status_code == 200
        server.engine.behaviour.is_dead = True
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
    app = create_app(settings, engine, store, on_engine_failure=lambda: reports.append("failed"))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        await asyncio.sleep(0.01)
        error_of(await client.get("/health/live"), 503, "engine_dead")
        error_of(await client.get("/v1/models"), 503, "engine_dead")
    assert reports == ["failed"]
    assert "no such model" in caplog.text


async def test_two_servers_live_in_one_process(serve: Serve):
    async with serve() as one, serve(FakeBehaviour(is_starting=True)) as two:
        assert (await one.complete()).status_code == 200
        assert (await two.complete()).status_code == 503
