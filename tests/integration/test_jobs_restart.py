"""Jobs survive their server: after a kill at any moment, the next server finds all accepted jobs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_schemas.jobs import Job
from tests.integration import command_server
from tests.integration.command_server import Process
from tests.integration.scripted_traces import HEADERS, RESULT, frames_of, trace
from tests.integration.served_jobs import sent_events
from tests.waiting import wait_for_async

pytestmark = pytest.mark.timeout(120)


class Jobs:
    """The jobs of a server's process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.client = process.client

    async def submit(self, script: str, key: str | None = None, *, rerun: bool = False) -> str:
        headers = HEADERS if key is None else {**HEADERS, "Idempotency-Key": key}
        params = {"rerun": rerun}
        response = await self.client.post("/v1/jobs", content=trace(script), headers=headers, params=params)
        assert response.status_code in {200, 202}, response.text
        return str(response.json()["id"])

    async def job(self, job_id: str) -> Job:
        return Job.model_validate((await self.client.get(f"/v1/jobs/{job_id}")).json())

    async def until(self, job_id: str, *statuses: str) -> Job:
        async def is_there() -> bool:
            return (await self.job(job_id)).status in statuses

        await wait_for_async(is_there)
        return await self.job(job_id)

    async def events(self, job_id: str) -> list[dict[str, Any]]:
        return sent_events((await self.client.get(f"/v1/jobs/{job_id}/events")).text)

    async def kill(self) -> None:
        self.process.process.kill()
        await self.process.process.wait()


@contextlib.asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Jobs]:
    settings = {"NNSIGHT_ENGINE_MAX_RUNNING_JOBS": "3", "NNSIGHT_ENGINE_DRAIN_TIMEOUT_S": "0.2"}
    async with command_server.started(folder, RELEASE_FILE=str(folder / "release"), **settings) as process:
        await wait_for_async(process.ready)
        yield Jobs(process)


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
        await server.kill()
    half = tmp_path / "data/jobs" / running / "result.1"
    half.write_bytes(b"half a result")
    (tmp_path / "release").touch()

    async with started(tmp_path) as server:
        interrupted = await server.job(running)
        assert interrupted.status == "ERROR"
        assert interrupted.error is not None
        assert interrupted.error.code == "interrupted"
        assert not half.exists()
        for job_id in [*queued, early, again]:
            assert (await server.until(job_id, "COMPLETED", "ERROR")).status == "COMPLETED"
        assert [(await server.job(job_id)).attempt for job_id in (*queued, early, again)] == [1] * 21 + [
            2
        ] * 2
        assert [event["status"] for event in await server.events(again)] == [
            "RECEIVED", "QUEUED", "DISPATCHED", "RUNNING", "QUEUED", "DISPATCHED", "RUNNING", "COMPLETED",
        ]  # fmt: skip
        assert (await server.job(done)).status == "COMPLETED"
        result = await server.client.get(f"/v1/jobs/{done}/result")
        assert frames_of(result.content)[-1].data == RESULT
        assert (await server.job(failed)).error is not None
        assert (await server.job(cancelled)).status == "CANCELLED"
        # What was accepted under a key is not run again.
        assert await server.submit("logs:3", key="done") == done
        assert await server.submit("ok", key="last") == queued[-1]
        assert await server.submit("hang", key="running") == running
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
                        server.process.process.send_signal(signal.SIGTERM)
        assert await server.process.ended() in {0, -signal.SIGTERM}
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
            await server.kill()
            yield b""

        with pytest.raises(httpx.TransportError):
            await server.client.post("/v1/jobs", content=half(), headers=HEADERS)
    assert len(received()) == 1
    async with started(tmp_path) as server:
        assert (await server.client.get("/v1/jobs")).json()["data"] == []
        assert received() == []
        assert list((tmp_path / "data/jobs").iterdir()) == []
