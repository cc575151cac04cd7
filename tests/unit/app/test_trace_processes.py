"""What a trace's process tells is kept for a client that does not read, up to a limit."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.engine.trace_processes import ProcessJob, TraceProcesses
from app.settings import Settings
from nnsight_engine.local_engine.process_channel import ProcessOptions
from nnsight_engine.remote_backend.backpressure import Backpressure
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest

REQUEST = TraceRequest(TraceHead(model="m", dialect="transformers"), [b"blocks"])


async def read(job: ProcessJob) -> list[Frame]:
    async with contextlib.aclosing(job.told()) as told:
        return [frame async for frame in told]


async def test_a_trace_whose_client_does_not_read_is_ended_with_a_typed_error() -> None:
    unread = Backpressure(2**30)
    job = ProcessJob(REQUEST, "local", unread)
    for _ in range(20):
        job.tell(JobStatus.LOG, "x" * 2**20)
    assert job.cancelled.is_set()
    assert job.frames.qsize() < 10
    with pytest.raises(ApiError, match="wait to be read") as caught:
        await read(job)
    assert caught.value.code is ErrorCode.CAPTURE_TOO_LARGE
    assert unread.num_bytes == 0


async def test_a_tenant_fills_its_share_of_the_queue_alone(tmp_path: Path) -> None:
    settings = Settings(max_queued_traces=4, result_dir=tmp_path)
    processes = TraceProcesses("nothing", ProcessOptions(model="m"), settings, {})

    async def send(tenant: str, *, is_patient: bool = False) -> None:
        request = TraceRequest(REQUEST.head, [b"blocks"])
        request.tenant = request.sender = tenant
        request.is_patient = is_patient
        async with contextlib.aclosing(processes.run_trace(request, "id")) as frames:
            async for _ in frames:
                pass

    async def wait(tenant: str, **more: bool) -> None:
        waiting.append(asyncio.create_task(send(tenant, **more)))
        await asyncio.sleep(0)

    waiting: list[asyncio.Task[None]] = []
    try:
        for _ in range(2):
            await wait("a")
        with pytest.raises(ApiError, match="2 traces of the tenant 'a'") as caught:
            await send("a")
        assert caught.value.code is ErrorCode.QUEUE_FULL
        await wait("a", is_patient=True)
        await wait("b")
        assert processes.num_waiting == 4
        with pytest.raises(ApiError, match="4 traces wait"):
            await send("b")
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert processes.num_waiting == 0


async def test_one_that_reads_is_told_of_everything_however_much_that_is() -> None:
    unread = Backpressure(2**22)
    job = ProcessJob(REQUEST, "local", unread)
    told = job.told()
    for number in range(20):
        job.tell(JobStatus.LOG, str(number) * 2**20)
        assert (await anext(told)).json()["message"] == str(number) * 2**20
    job.frames.put_nowait(Frame(FrameKind.RESULT, bytes(2**23)))
    job.frames.put_nowait(None)
    assert [len(frame.data) async for frame in told] == [2**23]
    assert not job.cancelled.is_set()
    assert unread.num_bytes == 0


async def test_of_many_the_slowest_goes() -> None:
    unread = Backpressure(2**22)
    slow, other = ProcessJob(REQUEST, "local", unread), ProcessJob(REQUEST, "local", unread)
    slow.tell(JobStatus.LOG, "x" * 3 * 2**20)
    other.tell(JobStatus.LOG, "y" * 2**21)
    assert (slow.cancelled.is_set(), other.cancelled.is_set()) == (True, False)
