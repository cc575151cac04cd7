"""One attempt at a job, ended at moments and by faults that no client of a server can bring about."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

import pytest

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobEvent, JobSummary
from app.admission.rates import Rates
from app.audit import AuditLog
from app.auth.keys import Keys
from app.auth.principal import ANONYMOUS
from app.engine.served_model import ServedModel
from app.http.lifecycle import Lifecycle, Startable
from app.limits.limit import Holder, Limit
from app.services.jobs import run as job_run
from app.services.jobs.run import Ending, JobParts, JobRun
from app.services.traces import TraceService
from app.settings import Settings
from app.storage.audit import AuditStore
from app.storage.database import Database
from app.storage.jobs import files
from app.storage.jobs.states import JobEnd
from app.storage.jobs.store import JobStore, NewJob
from app.storage.keys import KeyStore
from app.storage.quotas import StoredQuotas, sync_folder
from app.storage.tables import JOB_BYTES, JobRow
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest
from tests.integration.scripted_traces import ScriptedEngine, trace
from tests.waiting import wait_for_async

SUMMARY = JobSummary(model="m", dialect="vllm", kind="trace", num_blocks=1, python="3.12", client="1")
MAX_BYTES = 10_000_000
Store = TypeVar("Store", bound=JobStore)


class SlowToRefuse(ScriptedEngine):
    """Has no room for the first trace, and takes a while to say so."""

    num_asked = 0

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        self.num_asked += 1
        if self.num_asked == 1:
            await asyncio.sleep(0.05)
            raise ApiError(ErrorCode.QUEUE_FULL, "The engine's own queue is full.")
        async for frame in super().run_trace(request, job_id):
            yield frame


class Talkative(ScriptedEngine):
    """Has its own words for having been ended."""

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        try:
            async for frame in super().run_trace(request, job_id):
                yield frame
        except asyncio.CancelledError as error:
            raise ApiError(ErrorCode.TRACE_FAILED, "The trace was ended.") from error


class FailingStore(JobStore):
    """Its database fails at the first end, before or after the end was written."""

    has_failed = False
    is_written = False

    async def end(self, job: JobRow, end: JobEnd) -> JobEvent:
        if self.has_failed:
            return await super().end(job, end)
        self.has_failed = True
        if self.is_written:
            await super().end(job, end)
        raise ConnectionError


class DeafStore(JobStore):
    """Its database is away whenever events are told, as long as ``num_deaf`` lasts."""

    num_deaf = 5

    async def append_events(self, job: JobRow, events: Sequence[JobEvent]) -> None:
        self.num_deaf -= 1
        if self.num_deaf >= 0:
            raise ApiError(ErrorCode.DATABASE_UNAVAILABLE, "It cannot be reached.")
        await super().append_events(job, events)


class Bench:
    """What runs jobs, without a server around it."""

    def __init__(self, directory: Path) -> None:
        self.database = Database(directory)
        self.settings = Settings(data_dir=directory, job_store_bytes=MAX_BYTES, job_ttl_s=60)
        self.engine = ScriptedEngine()
        self.parts = JobParts(
            settings=self.settings,
            database=self.database,
            lifecycle=Lifecycle(cast("Startable", None)),
            served=lambda: ServedModel(("fake-model",), "fake-model"),
            traces=TraceService({"vllm": self.engine}),
            keys=Keys(KeyStore(self.database)),
            rates=Rates("memory://"),
            quotas=StoredQuotas(),
            log=AuditLog(AuditStore(self.database), 0),
            watch=lambda _run, _traceparent: lambda _ended: None,
        )
        self.files, self.store = self.parts.files, self.parts.store

    def store_of(self, kind: type[Store]) -> Store:
        """Have the runs write to another kind of store."""
        store = kind(self.database, self.files.process, waiting=Limit("jobs", 100), ttl_s=60)
        self.parts.store = store
        return store

    async def claimed(self, script: str = "ok") -> JobRow:
        """Return a job that was submitted and claimed."""
        async with self.files.received(chunks(trace(script)), Holder()) as upload:
            await self.files.adopt(upload, "job")
            new = NewJob("job", "", "m", SUMMARY, upload.digest, upload.num_bytes, None, reruns=False)
            await self.store.accept(new)
        job = await self.store.claim("m", {})
        assert job is not None
        return job

    def run(self, job: JobRow) -> JobRun:
        """Return a run of a job that has not begun."""
        return JobRun(job, ANONYMOUS, self.parts, asyncio.Semaphore(0), lambda: None)

    async def job(self) -> JobRow:
        return await self.store.get("job", "")

    def room(self) -> int:
        """Return how many bytes there is room for."""
        return MAX_BYTES - self.files.space.used()


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
    run = bench.run(job)
    running = asyncio.create_task(run.run())
    run.end_early(ending)
    await asyncio.wait_for(running, 10)
    assert (await bench.job()).status == status
    assert bench.engine.started == []


@pytest.mark.parametrize(
    ("device", "code", "message"),
    [
        ("/dev/full", "job_store_full", "No space left on device"),
        ("/dev/null", "internal_error", "could not be written"),  # it takes all, but cannot be synced
    ],
)
async def test_a_result_that_the_disk_does_not_take_ends_its_job_and_says_so(
    bench: Bench, tmp_path: Path, device: str, code: str, message: str
):
    job = await bench.claimed("block-fails")
    room = bench.room()
    file = tmp_path / "jobs/job/result.1"
    file.symlink_to(device)
    await bench.run(job).run()
    row = await bench.job()
    assert (row.status, row.code, row.result_bytes, row.lease_by) == ("ERROR", code, None, None)
    assert message in str(row.message)
    assert not file.is_symlink()
    assert bench.room() == room - row.event_bytes


@pytest.mark.parametrize("is_written", [True, False])
async def test_an_end_that_the_database_did_not_take_is_written_down_all_the_same(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_written: bool
):
    monkeypatch.setattr(job_run, "_RETRY_DELAYS_S", (0.0, 0.0))
    store = bench.store_of(FailingStore)
    store.is_written = is_written
    job = await bench.claimed()
    await bench.run(job).run()
    row = await bench.job()
    assert (row.status, store.has_failed) == ("COMPLETED", True)
    assert (tmp_path / "jobs/job/result.1").stat().st_size == row.result_bytes


async def test_a_run_that_is_ended_has_not_failed_whatever_its_engine_says(bench: Bench):
    engine = Talkative()
    job = await bench.claimed("hang")
    bench.parts.traces = TraceService({"vllm": engine})
    run = bench.run(job)
    running = asyncio.create_task(run.run())
    await wait_for_async(lambda: engine.num_running == 1)
    run.end_early(Ending.CANCELLED)
    await running
    row = await bench.job()
    assert (row.status, row.code) == ("CANCELLED", "job_cancelled")


async def test_a_job_whose_request_was_taken_away_says_so(bench: Bench, tmp_path: Path):
    job = await bench.claimed()
    (tmp_path / "jobs/job/request").unlink()
    await bench.run(job).run()
    row = await bench.job()
    assert (row.status, row.code) == ("ERROR", "internal_error")
    assert "send the trace as a new job" in str(row.message)


async def test_a_job_goes_on_while_its_events_cannot_be_written_and_loses_none(bench: Bench):
    job = await bench.claimed("logs:2000")
    store = bench.store_of(DeafStore)
    await bench.run(job).run()
    assert store.num_deaf < 0
    assert (await bench.job()).status == "COMPLETED"
    events = (await bench.store.events("job", "", after=0, limit=5000)).events
    logs = [event.message for event in events if event.status == "LOG"]
    assert logs == [f"line {count}" for count in range(2000)]


@pytest.mark.parametrize("taken_s", [0.01, 10.0])
async def test_a_job_is_dispatched_when_its_engine_takes_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, taken_s: float
):
    monkeypatch.setattr(job_run, "_ACCEPTED_S", taken_s)
    monkeypatch.setattr(job_run, "_BUSY_DELAYS_S", (0.0,))
    bench.parts.traces = TraceService({"vllm": SlowToRefuse()})
    job = await bench.claimed()
    await bench.run(job).run()
    events = (await bench.store.events("job", "", after=0, limit=20)).events
    refused = ["DISPATCHED", "QUEUED"] if taken_s < 1 else ["QUEUED"]
    assert [event.status for event in events] == [
        "RECEIVED", "QUEUED", *refused, "DISPATCHED", "RUNNING", "COMPLETED",
    ]  # fmt: skip


# Requests on their way to their jobs.


async def test_a_request_that_could_not_be_adopted_leaves_no_file_and_takes_no_room(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    room = bench.room()

    def fail(folder: Path) -> None:
        sync_folder(folder)
        if folder.name == "jobs":
            raise OSError(errno.EIO, "the disk has failed")

    monkeypatch.setattr(files, "sync_folder", fail)
    with pytest.raises(ApiError) as caught:
        await bench.claimed()
    assert caught.value.code == "internal_error"
    assert list((tmp_path / "jobs").iterdir()) == []
    monkeypatch.undo()
    assert bench.room() == room
    row = await bench.claimed()
    assert bench.room() == room - row.request_bytes - JOB_BYTES


async def test_a_request_whose_sender_leaves_while_it_is_adopted_takes_no_room(bench: Bench, tmp_path: Path):
    room = bench.room()
    for count in range(20):
        async with bench.files.received(chunks(trace()), Holder()) as upload:
            adopting = asyncio.create_task(bench.files.adopt(upload, f"job-{count}"))
            await asyncio.sleep(count * 1e-4)
            adopting.cancel()
            await asyncio.gather(adopting, return_exceptions=True)
            is_there = upload.is_adopted
        assert (tmp_path / f"jobs/job-{count}").exists() == is_there
        assert bench.room() == room - is_there * (upload.num_bytes + JOB_BYTES)
        room = bench.room()
    assert [path.name for path in (tmp_path / "servers").glob("*/*")] == [".lock"]
