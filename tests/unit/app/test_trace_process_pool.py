"""What a trace's process tells is kept up to a limit, and whatever it does its queue is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.engine import trace_process_pool
from app.engine.client import TraceEngine
from app.engine.process_engines import LocalTraceEngine, SessionTraces
from app.engine.trace_process_pool import ProcessJob, TraceProcesses
from app.settings import Settings
from nnsight_engine.local_engine.trace_process import LOCAL, OUTLINE, READY, ProcessOptions, TraceProcess
from nnsight_engine.remote_backend.frames import Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
from nnsight_engine.remote_backend.unread_output import Backpressure
from tests.waiting import wait_for_async

REQUEST = TraceRequest(TraceHead(model="m", dialect="transformers"), [b"blocks"])
REQUEST.sandbox_of = None


async def read(job: ProcessJob) -> list[Frame]:
    async with contextlib.aclosing(job.read_frames()) as told:
        return [frame async for frame in told]


async def test_a_trace_whose_client_does_not_read_is_ended_with_a_typed_error() -> None:
    unread = Backpressure(2**30)
    job = ProcessJob(REQUEST, "local", unread)
    for _ in range(20):
        job.notify(JobStatus.LOG, "x" * 2**20)
    assert job.cancelled.is_set()
    assert job.frames.qsize() < 10
    with pytest.raises(ApiError, match="are unread") as caught:
        await read(job)
    assert caught.value.code is ErrorCode.CAPTURE_TOO_LARGE
    assert unread.num_bytes == 0


async def test_a_tenant_fills_its_share_of_the_queue_alone(tmp_path: Path) -> None:
    settings = Settings(max_queued_traces=4, result_dir=tmp_path)
    processes = TraceProcesses("nothing", ProcessOptions(model="m"), settings, {})

    async def send(tenant: str, *, may_exceed_queue: bool = False) -> None:
        request = TraceRequest(REQUEST.head, [b"blocks"])
        request.sandbox_of = None
        request.tenant = request.sender = tenant
        request.may_exceed_queue = may_exceed_queue
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
        with pytest.raises(ApiError, match="The tenant 'a' may have 2 queued traces") as caught:
            await send("a")
        assert caught.value.code is ErrorCode.QUEUE_FULL
        await wait("a", may_exceed_queue=True)
        await wait("b")
        assert processes.num_waiting == 4
        with pytest.raises(ApiError, match="This server may have 4 queued traces"):
            await send("b")
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert processes.num_waiting == 0


async def test_a_reading_client_receives_everything_whatever_its_size() -> None:
    unread = Backpressure(2**22)
    job = ProcessJob(REQUEST, "local", unread)
    told = job.read_frames()
    for number in range(20):
        job.notify(JobStatus.LOG, str(number) * 2**20)
        assert (await anext(told)).json()["message"] == str(number) * 2**20
    job.frames.put_nowait(Frame(FrameKind.RESULT, bytes(2**23)))
    job.frames.put_nowait(None)
    assert [len(frame.data) async for frame in told] == [2**23]
    assert not job.cancelled.is_set()
    assert unread.num_bytes == 0


async def test_of_many_the_slowest_goes() -> None:
    unread = Backpressure(2**22)
    slow, other = ProcessJob(REQUEST, "local", unread), ProcessJob(REQUEST, "local", unread)
    slow.notify(JobStatus.LOG, "x" * 3 * 2**20)
    other.notify(JobStatus.LOG, "y" * 2**21)
    assert (slow.cancelled.is_set(), other.cancelled.is_set()) == (True, False)


class Scripted:
    """A process that says what it is told to, a value for each frame that it is asked for."""

    def __init__(self, *words: Any) -> None:
        self.pid = 1
        self.has_nothing_unread, self.has_ended = True, False
        self.words = list(words)
        self.num_closed = 0
        self.answers: list[Frame] = []

    async def frame(self) -> Frame:
        message = self.words.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message if isinstance(message, Frame) else json_frame(FrameKind.EVENT, message)

    async def run(self, number: int, chunks: Any) -> None:
        pass

    async def answer(self, frame: Frame) -> None:
        self.answers.append(frame)

    async def close(self) -> None:
        self.num_closed += 1
        self.has_ended = True


RESULT = Frame(FrameKind.RESULT, b"x")


class Ahead(TraceProcesses):
    name, purpose = "local", "the process"
    starts_ahead = True


async def run_in(
    children: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_traces: int
) -> list[ErrorCode | None]:
    """Run traces one after the other, and return how each failed."""

    async def start(*_args: Any, **_more: Any) -> Any:
        child = children.pop(0) if len(children) > 1 else children[0]
        if isinstance(child, BaseException):
            raise child
        return child

    monkeypatch.setattr(trace_process_pool, "TraceProcess", SimpleNamespace(start=start))
    monkeypatch.setattr(trace_process_pool, "_PAUSE_S", 0.0)
    monkeypatch.setattr(trace_process_pool, "_RETRY_S", 0.0)
    processes = Ahead("nothing", ProcessOptions(model="m"), Settings(result_dir=tmp_path), {})
    processes.start()
    ends: list[ErrorCode | None] = []
    try:
        for _ in range(num_traces):
            try:
                async with (
                    asyncio.timeout(60),
                    contextlib.aclosing(processes.run_trace(REQUEST, "id")) as frames,
                ):
                    [_ async for _ in frames]
                ends.append(None)
            except ApiError as error:
                ends.append(error.code)
        drivers = processes._drivers  # noqa: SLF001 - one of several may have ended unseen
        assert not any(driver.done() for driver in drivers)
    finally:
        await processes.close()
    return ends


@pytest.mark.parametrize("message", [["ready"], "ready", 5, None, True])
async def test_whatever_a_process_says_first_its_queue_is_served(
    message: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, good = Scripted(message, RESULT, {READY: 1}), Scripted({READY: 1}, RESULT, {READY: 1})
    [end] = await run_in([odd, good], tmp_path, monkeypatch, 1)
    assert end is None
    assert RESULT in odd.words
    assert RESULT not in good.words


@pytest.mark.parametrize("error", [RuntimeError("no"), ValueError("embedded null byte"), OSError("no room")])
async def test_a_start_that_fails_fails_the_traces_and_is_tried_again(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await run_in([error], tmp_path, monkeypatch, 2) == [ErrorCode.LOCAL_ENGINE_FAILED] * 2
    good = Scripted({READY: 1}, RESULT, {READY: 1})
    assert await run_in([error, good], tmp_path, monkeypatch, 1) == [None]


@pytest.mark.parametrize("message", [["ready"], 5, RuntimeError("no"), Frame(FrameKind.EVENT, b"{")])
async def test_a_process_that_does_not_settle_is_replaced_and_the_next_trace_runs(
    message: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Scripted({READY: 1}, RESULT, message), Scripted({READY: 1}, RESULT, {READY: 1})
    assert await run_in([first, second], tmp_path, monkeypatch, 2) == [None, None]
    assert first.num_closed == 1


class Asking:
    """A trace whose process asks its client, or its engine, for something."""

    def __init__(self, kind: str, folder: Path, answer: Any, num: int, pause_s: float = 0.0) -> None:
        self.child = Hasty(*[Frame(FrameKind.RESULT, b"a part")] * num)
        self.child.pause_s = pause_s
        self.message = {LOCAL if kind == "local" else OUTLINE: True}
        request = TraceRequest(REQUEST.head, [b"blocks"])
        request.sandbox_of = None
        request.call_client = answer
        self.job = ProcessJob(request, "local", Backpressure(2**22))
        settings, options = Settings(result_dir=folder), ProcessOptions(model="m")
        self.processes: TraceProcesses = (
            LocalTraceEngine(options, settings, {})
            if kind == "local"
            else SessionTraces(cast("TraceEngine", None), answer, options, settings, {})
        )

    async def ask(self) -> Frame:
        """Ask once; returns the answer as soon as the process has it."""
        num = len(self.child.answers)
        await self.processes.serve_request(cast("TraceProcess", self.child), self.message, self.job)
        async with asyncio.timeout(60):
            while len(self.child.answers) == num:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
        return self.child.answers[-1]


class Hasty(Scripted):
    """A process that has an answer before the server knows that it is sent."""

    pause_s = 0.0

    async def answer(self, frame: Frame) -> None:
        await super().answer(frame)
        await asyncio.sleep(self.pause_s)


@pytest.mark.parametrize("kind", ["local", "session"])
async def test_what_a_process_asks_for_is_answered_also_where_that_fails(kind: str, tmp_path: Path) -> None:
    async def fail(*_: Any) -> Any:
        raise ValueError("it is broken")

    @contextlib.asynccontextmanager
    async def fail_to_call(*_: Any) -> AsyncIterator[bytes]:
        yield await fail()

    answer = await Asking(kind, tmp_path, fail_to_call if kind == "local" else fail, 1).ask()
    assert answer.kind is FrameKind.ERROR
    assert answer.json()["error"]["code"] == ErrorCode.INTERNAL


@pytest.mark.parametrize("kind", ["local", "session"])
async def test_a_process_may_send_its_next_request_as_soon_as_it_has_an_answer(
    kind: str, tmp_path: Path
) -> None:
    held: list[bytes] = []

    @contextlib.asynccontextmanager
    async def call(data: Any) -> AsyncIterator[bytes]:
        held.append(data)
        yield b"done"
        held.remove(data)

    async def outline() -> dict[str, Any]:
        return {}

    asking = Asking(kind, tmp_path, call if kind == "local" else outline, 3, pause_s=0.05)
    for _ in range(3):
        assert (await asking.ask()).kind is not FrameKind.ERROR
        # An answer is given back when the process has taken all of it.
        assert len(held) == (kind == "local")
    await wait_for_async(lambda: not held)
    await asking.job.end_request()
