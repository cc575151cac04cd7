"""One attempt at a job, ended at moments and by faults that no client of a server can bring about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from api_schemas.errors import ApiError
from api_schemas.jobs import JobSummary
from app.services.job_runs import Ending, JobRun, JobTools
from app.services.local_calls import LocalCalls
from app.services.traces import TraceService
from app.storage.database import Database
from app.storage.job_files import JobFiles
from app.storage.job_leases import JobLeases
from app.storage.jobs import JobStore, NewJob
from app.storage.tables import JobRow
from tests.integration.scripted_traces import ScriptedEngine, trace

SUMMARY = JobSummary(model="m", dialect="vllm", kind="trace", num_blocks=1, python="3.12", client="1")
MAX_BYTES = 10_000_000


class Bench:
    """What runs jobs, without a server around it."""

    def __init__(self, directory: Path) -> None:
        self.database = Database(directory)
        self.files = JobFiles(directory, max_bytes=MAX_BYTES)
        self.store = JobStore(self.database, max_queued=100, ttl_s=60)
        self.leases = JobLeases(self.database, holder="here", ttl_s=60)
        self.engine = ScriptedEngine()
        self.tools = JobTools(
            traces=TraceService({"vllm": self.engine}),
            files=self.files,
            leases=self.leases,
            check=lambda head: None,
            told=lambda job_id: None,
            calls=LocalCalls(1),
        )

    async def claimed(self, script: str = "ok") -> JobRow:
        """Return a job that was submitted and claimed."""
        async with self.files.received(chunks(trace(script))) as upload:
            await self.files.adopt(upload, "job")
            new = NewJob("job", "", "m", SUMMARY, upload.digest, upload.num_bytes, None, reruns=False)
            await self.store.accept(new)
        job = await self.leases.claim("m", {})
        assert job is not None
        return job

    async def job(self) -> JobRow:
        return await self.store.get("job", "")

    def room(self) -> int:
        """Return how many bytes there is room for."""
        low, high = 0, MAX_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            try:
                self.files.space.take(middle)
            except ApiError:
                high = middle - 1
            else:
                self.files.space.give_up(middle)
                low = middle
        return low


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.database.start()
    await made.files.start()
    yield made
    await made.files.close()
    await made.database.close()


@pytest.mark.parametrize(("ending", "status"), [(Ending.CANCELLED, "CANCELLED"), (Ending.STOPPED, "QUEUED")])
async def test_a_run_that_is_ended_before_its_first_step_does_not_run(
    bench: Bench, ending: Ending, status: str
):
    job = await bench.claimed("hang")
    run = JobRun(job, bench.tools)
    running = asyncio.create_task(run.run())
    run.end_early(ending)
    await asyncio.wait_for(running, 10)
    assert (await bench.job()).status == status
    assert bench.engine.started == []
