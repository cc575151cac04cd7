"""Jobs survive their server: after a kill at any moment, the next server finds all accepted jobs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.integration import command_server
from tests.integration.scripted_traces import HEADERS, RESULT, frames_of, trace
from tests.integration.served_jobs import Jobs
from tests.waiting import wait_for_async

pytestmark = pytest.mark.timeout(120)


@contextlib.asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Jobs]:
    settings = {"NNSIGHT_ENGINE_MAX_RUNNING_JOBS": "3", "NNSIGHT_ENGINE_DRAIN_TIMEOUT_S": "0.2"}
    async with command_server.started(folder, RELEASE_FILE=str(folder / "release"), **settings) as process:
        await wait_for_async(process.ready)
        yield Jobs(process, None)


async def kill(server: Jobs) -> None:
    server.server.process.kill()
    await server.server.process.wait()


async def test_a_killed_server_finds_its_jobs_again(tmp_path: Path):
    async with started(tmp_path) as server:
        done = await server.submit("logs:3", key="done")
        failed = await server.submit("refused")
        cancelled = await server.submit("hang", key="cancelled")
        await server.until(cancelled, "RUNNING")
        await server.client.post(f"/v1/jobs/{cancelled}/cancel")
        for job_id in (done, failed, cancelled):
            await server.until(job_id, "COMPLETED", "ERROR", "CANCELLED")
        running = await server.submit("hang", key="running")
        again = await server.submit("hang", rerun=True)
        early = await server.submit("hang-early")
        await server.until(running, "RUNNING")
        await server.until(again, "RUNNING")
        await server.until(early, "DISPATCHED")
        # No room for these, so they wait; the last one's answer is hardly out.
        queued = [await server.submit("ok") for _ in range(20)]
        queued.append(await server.submit("ok", key="last"))
        await kill(server)
    half = tmp_path / "data/jobs" / running / "result.1"
    half.write_bytes(b"half a result")
    (tmp_path / "release").touch()

    async with started(tmp_path) as server:
        interrupted = await server.get(running)
        assert interrupted.status == "ERROR"
        assert interrupted.error is not None
        assert interrupted.error.code == "interrupted"
        assert not half.exists()
        for job_id in [*queued, early, again]:
            assert (await server.until(job_id, "COMPLETED", "ERROR")).status == "COMPLETED"
        assert [(await server.get(job_id)).attempt for job_id in (*queued, early, again)] == [1] * 21 + [
            2
        ] * 2
        assert [event["status"] for event in await server.events(again)] == [
            "RECEIVED", "QUEUED", "DISPATCHED", "RUNNING", "QUEUED", "DISPATCHED", "RUNNING", "COMPLETED",
        ]  # fmt: skip
        assert (await server.get(done)).status == "COMPLETED"
        result = await server.client.get(f"/v1/jobs/{done}/result")
        assert frames_of(result.content)[-1].data == RESULT
        assert (await server.get(failed)).error is not None
        assert (await server.get(cancelled)).status == "CANCELLED"
        # What was accepted under a key is not run again.
        assert (await server.post("logs:3", key="done")).json()["id"] == done
        assert (await server.post("ok", key="last")).json()["id"] == queued[-1]
        assert (await server.post("hang", key="running")).json()["id"] == running
        answer = await server.client.post(f"/v1/jobs/{running}/rerun")
        assert answer.status_code == 202
        assert (await server.until(running, "COMPLETED", "ERROR")).status == "COMPLETED"
        listed = (await server.client.get("/v1/jobs", params={"limit": 100})).json()["data"]
        assert len({job["id"] for job in listed}) == 3 + 3 + len(queued)


async def test_a_stopping_server_returns_its_jobs_to_the_queue(tmp_path: Path):
    async with started(tmp_path) as server:
        job_id = await server.submit("hang")
        await server.until(job_id, "RUNNING")
        path = f"/v1/jobs/{job_id}/events"
        with pytest.raises(httpx.RemoteProtocolError):
            # Whoever follows it is cut off, and comes back.
            async with server.client.stream("GET", path) as response:
                async for line in response.aiter_lines():
                    if '"RUNNING"' in line:
                        server.server.process.send_signal(signal.SIGTERM)
        assert await server.server.ended() in {0, -signal.SIGTERM}
    (tmp_path / "release").touch()
    async with started(tmp_path) as server:
        job = await server.until(job_id, "COMPLETED", "ERROR")
        assert (job.status, job.attempt) == ("COMPLETED", 2)


@pytest.mark.heavy
async def test_uploads_that_a_crash_cut_off_are_removed(tmp_path: Path):
    def received() -> list[Path]:
        return [path for path in (tmp_path / "data/servers").glob("*/*") if path.name != ".lock"]

    async with started(tmp_path) as server:

        async def half() -> AsyncIterator[bytes]:
            yield trace(payload=bytes(5_000_000))[:3_000_000]
            await wait_for_async(lambda: len(received()) == 1)
            await kill(server)
            yield b""

        with pytest.raises(httpx.TransportError):
            await server.client.post("/v1/jobs", content=half(), headers=HEADERS)
    assert len(received()) == 1
    async with started(tmp_path) as server:
        assert (await server.client.get("/v1/jobs")).json()["data"] == []
        assert received() == []
        assert list((tmp_path / "data/jobs").iterdir()) == []
