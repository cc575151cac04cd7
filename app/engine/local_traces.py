"""Traces on the local engine: a ``LanguageModel`` in a process of its own, for what vLLM cannot do.

One process, one trace at a time. A trace that kills the process, or does not end when it is told to, costs
itself alone: the process is started anew and the next trace runs. Nothing of a trace is read here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.engine.fair_queue import FairQueue
from app.errors import internal_error
from app.services.traces import event_frame
from app.settings import Settings
from nnsight_engine.local_engine.child import Child, ProcessEndedError
from nnsight_engine.local_engine.link import CANCEL, FAILED, READY, WORN, ProcessOptions
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.wire import DecodeError

logger = logging.getLogger(__name__)

CANCEL_GRACE_S: Final = 5.0
"""How long a trace has to end that was told to, before its process is ended."""

_LOAD_LIMIT_S: Final = 900.0
_PAUSE_S: Final = 30.0
"""After a model that could not be loaded, how long traces are refused before it is tried again."""

_MAX_EVENT_BYTES: Final = 2**21
_MODULE: Final = "nnsight_engine.local_engine.process"


class _Job:
    """A trace on its way.

    Attributes:
        request: The trace.
        frames: What its client is to be told; an error, or None, is the last.
        cancelled: Set when nobody waits for it any more.
        is_late: Whether its time is over.
        position: How many are before it, as its client was told last.
        has_begun: Whether it was run; if not, another process may try.
    """

    def __init__(self, request: TraceRequest) -> None:
        self.request = request
        self.frames: asyncio.Queue[Frame | ApiError | None] = asyncio.Queue()
        self.cancelled = asyncio.Event()
        self.is_late = False
        self.position = 0
        self.has_begun = False

    def tell(self, status: JobStatus, message: str | None = None) -> None:
        """Tell its client of an event."""
        self.frames.put_nowait(event_frame(status, message=message, engine=LocalTraceEngine.name))


class LocalTraceEngine:
    """Runs traces in a process beside the server.

    Args:
        options: The model, and where it goes.
        settings: The server's.
        environment: Of the process.
    """

    name = "local"

    def __init__(self, options: ProcessOptions, settings: Settings, environment: Mapping[str, str]) -> None:
        """Start nothing yet."""
        self._options = options
        self._environment = environment
        self._time_limit_s = settings.trace_time_limit_s
        self._max_queued = settings.max_queued_traces
        self._queue: FairQueue[_Job] = FairQueue()
        self._child: Child | None = None
        self._driver: asyncio.Task[None] | None = None
        self._running: _Job | None = None
        self._is_worn = False
        self._failure = ""
        self._retry_at = 0.0
        self._num_runs = 0

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return None if self._child is None else self._child.pid

    @property
    def num_waiting(self) -> int:
        """How many traces wait."""
        return len(self._queue)

    def start(self, after: Awaitable[Any] | None = None) -> None:
        """Begin to take traces; the model is loaded in the background, once ``after`` is over."""
        self._driver = asyncio.create_task(self._drive(after), name="local-engine")

    async def close(self) -> None:
        """End the process; traces that run or wait fail."""
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        if self._child is not None:
            await self._child.close()
            self._child = None
        refusal = ApiError(ErrorCode.DRAINING, "The server is shutting down; send the trace to another one.")
        for job in [*self._queue, *([self._running] if self._running else [])]:
            self._queue.remove(job)
            job.frames.put_nowait(refusal)

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:  # noqa: ARG002 - the protocol's
        """Run a trace; see ``TraceEngine``.

        Raises:
            ApiError: Too many wait, the trace cannot be read, took too long or ended its process, or the
                model cannot be loaded.
        """
        job = _Job(request)
        self._check_takes_more()
        self._queue.add(request.sender, job)
        if self._child is None:
            job.tell(JobStatus.QUEUED, "the model is being loaded")
        self._tell_positions()
        try:
            while (item := await job.frames.get()) is not None:
                if isinstance(item, ApiError):
                    raise item
                yield item
        finally:
            job.cancelled.set()
            if self._queue.remove(job):
                self._tell_positions()

    def _check_takes_more(self) -> None:
        num_waiting = len(self._queue)
        is_free = self._running is None and not num_waiting
        if not is_free and num_waiting >= self._max_queued:
            raise ApiError(
                ErrorCode.QUEUE_FULL,
                f"{num_waiting} traces wait for the local engine, which runs one at a time, and no more may "
                "(max_queued_traces); send it again later.",
            )

    def _tell_positions(self) -> None:
        """Tell waiting clients how many are before them, where that is news."""
        for index, job in enumerate(self._queue):
            position = index + (self._running is not None)
            if position and position != job.position:
                job.tell(JobStatus.QUEUED, f"{position} before this one")
            job.position = position

    # The process.

    async def _drive(self, after: Awaitable[Any] | None) -> None:
        """Keep a process, and run one trace after the other in it."""
        if after is not None:
            await after
        while True:
            with contextlib.suppress(ApiError):
                await self._ready()
            job = self._running = await self._queue.take()
            self._tell_positions()
            try:
                await self._serve(job)
            except ApiError as error:
                job.frames.put_nowait(error)
            except Exception:
                logger.exception("a trace failed on its way")
                job.frames.put_nowait(internal_error())
                await self._drop()
            self._running = None

    async def _ready(self) -> Child:
        """Return the process, started and loaded.

        Raises:
            ApiError: The model cannot be loaded.
        """
        if self._child is not None and not self._child.has_ended:
            return self._child
        await self._drop()
        if time.monotonic() < self._retry_at:
            raise self._refusal()
        max_bytes = self._options.max_result_bytes + 2**20
        try:
            child = self._child = await Child.start(
                _MODULE, self._options, self._environment, max_bytes=max_bytes
            )
            async with asyncio.timeout(_LOAD_LIMIT_S):
                word = (await child.frame()).json()
            if READY in word:
                return child
            self._failure = str(word.get(FAILED, ""))
        except (ProcessEndedError, OSError, TimeoutError, DecodeError) as error:
            self._failure = str(error) or "it took too long"
        logger.error("the local engine could not load the model: %s", self._failure)
        await self._drop()
        self._retry_at = time.monotonic() + _PAUSE_S
        raise self._refusal()

    def _refusal(self) -> ApiError:
        return ApiError(
            ErrorCode.LOCAL_ENGINE_FAILED,
            f"The local engine could not load the model: {self._failure}. The server's log says more; VLLM "
            "traces run.",
        )

    async def _drop(self) -> None:
        """End the process; the next trace gets another one."""
        child, self._child, self._is_worn = self._child, None, False
        if child is not None:
            await child.close()

    # A trace.

    async def _serve(self, job: _Job) -> None:
        """Run a trace.

        Raises:
            ApiError: There is no process for it, it has ended, or it refused the trace.
        """
        if job.cancelled.is_set():
            return
        try:
            await self._serve_in(await self._ready(), job)
        except ProcessEndedError as error:
            await self._drop()
            if job.has_begun or job.cancelled.is_set():
                raise self._ended(job, error) from error
            try:
                await self._serve_in(await self._ready(), job)  # that one had ended before
            except ProcessEndedError as again:
                await self._drop()
                raise self._ended(job, again) from again

    async def _serve_in(self, child: Child, job: _Job) -> None:
        """Run a trace in a process, and pass on what that says.

        Raises:
            ApiError: The process refused the trace.
            ProcessEndedError: The process has ended.
        """
        self._num_runs += 1
        number = self._num_runs
        watch = asyncio.create_task(self._watch(child, job, number))
        try:
            await child.run(number, job.request.chunks())
            while not self._pass_on(await child.frame(), job):
                pass
        except DecodeError as error:
            logger.warning("a trace made its process say what it never says: %s", error)
            raise ProcessEndedError(None) from error
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if self._is_worn:
            await self._drop()

    async def _watch(self, child: Child, job: _Job, number: int) -> None:
        """End a trace that nobody waits for or whose time is over; politely first."""
        try:
            async with asyncio.timeout(self._time_limit_s):
                await job.cancelled.wait()
        except TimeoutError:
            job.is_late = True
        with contextlib.suppress(ProcessEndedError, TimeoutError):
            async with asyncio.timeout(CANCEL_GRACE_S):
                await child.say({CANCEL: number})
                await asyncio.sleep(CANCEL_GRACE_S)
        child.kill()

    def _pass_on(self, frame: Frame, job: _Job) -> bool:
        """Tell the client what the process says, as far as it is its to say; True if it was the last.

        Raises:
            ApiError: The trace failed.
            DecodeError: The process says what it should not, on a block's behalf.
        """
        if frame.kind is FrameKind.RESULT:
            job.frames.put_nowait(frame)
            job.frames.put_nowait(None)
            return True
        if len(frame.data) > _MAX_EVENT_BYTES:
            raise DecodeError("an event is too long")
        said = frame.json()
        if not isinstance(said, dict):
            raise DecodeError("an event is an object")
        if frame.kind is FrameKind.ERROR:
            raise self._failed(said, job)
        if WORN in said:
            self._is_worn = True
        elif said.get("status") == JobStatus.RUNNING:
            job.has_begun = True
            job.tell(JobStatus.RUNNING)
        elif said.get("status") == JobStatus.LOG:
            job.tell(JobStatus.LOG, str(said.get("message", "")))
        return False

    def _failed(self, said: dict[str, Any], job: _Job) -> ApiError:
        error = said.get("error")
        error = error if isinstance(error, dict) else {}
        if error.get("code") == ErrorCode.INVALID_TRACE:
            return ApiError(ErrorCode.INVALID_TRACE, str(error.get("message", "")))
        return self._late() if job.is_late else internal_error()

    def _ended(self, job: _Job, error: ProcessEndedError) -> ApiError:
        if job.is_late:
            return self._late()
        return ApiError(
            ErrorCode.TRACE_PROCESS_ENDED,
            f"The process that ran the trace has ended: {error}. A block can do that by running out of "
            "memory or by ending it on purpose; the server has started another one.",
        )

    def _late(self) -> ApiError:
        return ApiError(
            ErrorCode.TRACE_TIMED_OUT,
            f"The trace ran for {self._time_limit_s:g} s, which is all that one may (trace_time_limit_s).",
        )


__all__ = ["CANCEL_GRACE_S", "LocalTraceEngine"]
