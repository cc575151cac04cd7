"""Traces in processes of their own: scheduling, time limits, and validation of the data that they send.

A trace that kills its process, or does not stop when it is cancelled, costs only itself: the process is
restarted and the next trace runs. The trace's payload is not decoded here. Requests that a process sends
while its trace runs are carried out one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.engine.client import event_frame
from app.http.errors import internal_error
from app.limits.slots import FairQueue
from app.limits.tenant_budget import TenantBudget
from app.settings import Settings
from nnsight_engine.core.work_context import current_work
from nnsight_engine.local_engine.trace_process import (
    CANCEL,
    FAILED,
    READY,
    ProcessEndedError,
    ProcessOptions,
    TraceProcess,
)
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.remote_backend.unread_output import Backpressure, SlowReaderError
from nnsight_engine.serialization import DecodeError

_MAX_UNREAD_BYTES: Final = 16 * 2**20
"""Unread events of one trace."""

_ANSWERED_S: Final = 5.0
"""How long a request of a process may take to return after its answer was sent."""


class ProcessJob:
    """A trace that is queued or running.

    Attributes:
        frames: Frames for the client; an ApiError or None ends them.
        has_begun: Whether it has started to run; if not, another process may retry it.
        released: Resolved when it uses no resources any more.
    """

    def __init__(self, request: TraceRequest, engine: str, unread: Backpressure) -> None:
        self.request = request
        self.engine = engine
        self.frames: asyncio.Queue[Frame | ApiError | None] = asyncio.Queue()
        self.cancelled = asyncio.Event()
        self.is_late = False
        self.position = 0
        self.num_prints = 0
        self.has_begun = False
        self.context = contextvars.copy_context()
        work = current_work()
        self.meter = None if work is None else work.meter
        self.released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.meter is not None:
            self.meter.expect(self.released)
        self._request: asyncio.Task[None] | None = None
        self._share = unread.share(self._end_unread, _MAX_UNREAD_BYTES)

    def notify(self, status: JobStatus, message: str | None = None) -> None:
        frame = event_frame(status, message=message, engine=self.engine)
        self.frames.put_nowait(frame)
        self._share.add(len(frame.data))

    async def read_frames(self) -> AsyncGenerator[Frame, None]:
        """Yield the frames for the client as they come; raises the ApiError that ends the trace."""
        try:
            while (item := await self.frames.get()) is not None:
                if isinstance(item, ApiError):
                    raise item
                if item.kind is FrameKind.EVENT:
                    self._share.take(len(item.data))
                yield item
        finally:
            self._share.close()

    def end(self) -> None:
        """Record that it uses no resources any more; idempotent."""
        if not self.released.done():
            self.released.set_result(None)

    async def wait_answered(self) -> None:
        """Raise DecodeError if the last request of its process is not over.

        The process may have its answer, and send the next one, before the task that sent it has returned.
        """
        request = self._request
        if request is not None and not request.done():
            await asyncio.wait({request}, timeout=_ANSWERED_S)
            if not request.done():
                raise DecodeError("a trace process sent a second request before the first was answered")

    def serve(self, request: Coroutine[Any, Any, None], context: contextvars.Context | None = None) -> None:
        """Carry out a request of its process in a task of its own, while the process is read."""
        self._request = asyncio.create_task(request, context=context)

    async def end_request(self) -> None:
        if self._request is not None:
            self._request.cancel()
            await asyncio.gather(self._request, return_exceptions=True)

    def _end_unread(self, error: SlowReaderError) -> None:
        """Cancel the trace, discard its unread frames and leave the reason for the next read."""
        while not self.frames.empty():
            self.frames.get_nowait()
        self.frames.put_nowait(ApiError(ErrorCode.CAPTURE_TOO_LARGE, str(error)))
        self.cancelled.set()


logger = logging.getLogger(__name__)

CANCEL_GRACE_S: Final = 5.0
"""Grace period of a cancelled trace before its process is killed."""

_LOAD_LIMIT_S: Final = 900.0
_SETTLE_LIMIT_S: Final = 120.0
"""How long a process may take to undo a trace's effects before it is killed."""

_PAUSE_S: Final = 30.0
"""After a failed start of a process, how long traces are refused before the next attempt."""

_RETRY_S: Final = 1.0
"""The delay after a fault that no trace has caused."""

_MAX_EVENT_BYTES: Final = 2**21
_MAX_ALL_UNREAD_BYTES: Final = 256 * 2**20
"""Unread events of all traces."""

_MAX_PRINTS: Final = 20_000
"""Prints of one trace; the process itself limits their bytes."""


class TraceProcesses:
    """Runs traces in processes that run ``module`` with ``options``; a ``TraceEngine``."""

    name = ""
    queue = ""
    purpose = ""
    """The purpose of the processes, for messages."""
    starts_ahead = False
    """Whether processes are started before a trace arrives."""
    are_engines = True
    """Whether a trace that runs in one occupies an engine."""

    def __init__(
        self,
        module: str,
        options: ProcessOptions,
        settings: Settings,
        environment: Mapping[str, str],
        *,
        num_processes: int = 1,
    ) -> None:
        self.module = module
        self.options = options
        self.environment = environment
        self.time_limit_s = settings.trace_time_limit_s
        self.waiting = TenantBudget.of(settings).waiting_traces
        self.max_frame_bytes = max(options.max_result_bytes, settings.max_trace_request_bytes) + 2**20
        self._queue: FairQueue[ProcessJob] = FairQueue()
        self._slots = [_ProcessSlot(self) for _ in range(num_processes)]
        self._drivers: list[asyncio.Task[None]] = []
        self._unread = Backpressure(_MAX_ALL_UNREAD_BYTES)

    @property
    def pids(self) -> list[int]:
        return [slot.child.pid for slot in self._slots if slot.child is not None]

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def num_waiting_of(self, sender: str) -> int:
        return sum(job.request.sender == sender for job in self._queue)

    @property
    def num_running(self) -> int:
        return sum(slot.running is not None for slot in self._slots)

    def start(self, after: Awaitable[Any] | None = None) -> None:
        """Begin to serve traces once ``after`` has completed; loading happens in the background."""
        after = None if after is None else asyncio.ensure_future(after)
        self._drivers = [
            asyncio.create_task(slot.drive(after), name=f"{self.purpose} {index}")
            for index, slot in enumerate(self._slots)
        ]

    async def close(self) -> None:
        """Kill the processes; running and queued traces fail."""
        for driver in self._drivers:
            driver.cancel()
        await asyncio.gather(*self._drivers, return_exceptions=True)
        await asyncio.gather(*(slot.drop() for slot in self._slots))
        refusal = ApiError(ErrorCode.DRAINING, "The server is shutting down; send the trace to another one.")
        for job in [*self._queue, *(slot.running for slot in self._slots if slot.running is not None)]:
            self._queue.remove(job)
            job.end()
            job.frames.put_nowait(refusal)

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:  # noqa: ARG002 - the protocol's
        """Run a trace in a process, see ``TraceEngine``.

        Raises ApiError also if no process can be started, or the process ended.
        """
        if request.sandbox_of is not None:
            raise ApiError(
                ErrorCode.SANDBOX_MISSING,
                f"{self.purpose[0].upper()}{self.purpose[1:]} has no sandbox: it runs code of keys of the "
                "tier 'trusted' alone. Single traces on vLLM run in a sandbox.",
            )
        self._check_takes_more(request)
        job = ProcessJob(request, self.name, self._unread)
        self._queue.add(request.sender, job)
        if not self.pids:
            job.notify(JobStatus.QUEUED, f"{self.purpose} is being started")
        self.notify_positions()
        try:
            async with contextlib.aclosing(job.read_frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            job.cancelled.set()
            if self._queue.remove(job):
                job.end()
                self.notify_positions()

    def _check_takes_more(self, request: TraceRequest) -> None:
        """Raise ``queue_full`` if the trace has to wait and its tenant has its share of the queue already."""

        def waiting_of(tenant: str) -> int:
            return sum(tenant in {"", job.request.tenant} for job in self._queue)

        if len(self._queue) or self.num_running == len(self._slots):
            self.waiting.check("" if request.may_exceed_queue else request.tenant, used=waiting_of)

    async def next_job(self) -> ProcessJob:
        return await self._queue.take()

    def notify_positions(self) -> None:
        """Send waiting clients their position in the queue if it has changed."""
        is_busy = self.num_running == len(self._slots)
        for index, job in enumerate(self._queue):
            position = index + is_busy
            if position and position != job.position:
                job.notify(JobStatus.QUEUED, f"{position} before this one")
            job.position = position

    async def serve_request(self, child: TraceProcess, message: dict[str, Any], job: ProcessJob) -> None:
        """Raise DecodeError for a request of a trace's process that is unknown here."""
        del child, job
        raise DecodeError(f"a trace process sent an unknown request: {', '.join(message)}")


class _ProcessSlot:
    def __init__(self, traces: TraceProcesses) -> None:
        self._traces = traces
        self.child: TraceProcess | None = None
        self.running: ProcessJob | None = None
        self._is_settled = True
        self._failure = ""
        self._retry_at = 0.0
        self._num_runs = 0

    async def drive(self, after: Awaitable[Any] | None) -> None:
        """Run the queue's traces one after another, for ever."""
        if after is not None:
            await after
        while True:
            try:
                await self._run_next()
            except Exception:  # must go on: nothing else serves the queue
                logger.exception("%s failed between two traces", self._traces.purpose)
                await asyncio.sleep(_RETRY_S)

    async def _run_next(self) -> None:
        """Run the next trace of the queue; its errors are for its client, and do not end the slot."""
        if self._traces.starts_ahead:
            with contextlib.suppress(ApiError):
                await self._ready_process()
        job = self.running = await self._traces.next_job()
        is_broken = False
        try:
            self._traces.notify_positions()
            await self._run_with_retry(job)
        except ApiError as error:
            job.frames.put_nowait(error)
        except Exception:
            logger.exception("a trace failed in the server")
            job.frames.put_nowait(internal_error())
            is_broken = True
        self.running = None
        job.end()
        await (self.drop() if is_broken else self._wait_settled())

    async def _wait_settled(self) -> None:
        """Wait until the process has undone the effects of an answered trace; kill it if it does not."""
        child = self.child
        if child is None or self._is_settled:
            return
        message: dict[str, Any] = {}
        try:
            with contextlib.suppress(ProcessEndedError, TimeoutError, DecodeError):
                async with asyncio.timeout(_SETTLE_LIMIT_S):
                    message = await _receive_status(child)
        finally:
            if READY not in message:
                await self.drop()
            self._is_settled = True

    async def _ready_process(self) -> TraceProcess:
        """Return the running process, or a new one; raises ApiError if it fails or has just failed."""
        if self.child is not None and not self.child.has_ended:
            return self.child
        await self.drop()
        if time.monotonic() < self._retry_at:
            raise self._start_failure()
        traces = self._traces
        try:
            child = self.child = await TraceProcess.start(
                traces.module, traces.options, traces.environment, max_bytes=traces.max_frame_bytes
            )
            async with asyncio.timeout(_LOAD_LIMIT_S):
                message = await _receive_status(child)
            if READY in message:
                return child
            self._failure = str(message.get(FAILED, ""))
        except (ProcessEndedError, OSError, TimeoutError, DecodeError) as error:
            self._failure = str(error) or "it took too long"
        except Exception as error:
            logger.exception("%s: starting the process failed", traces.purpose)
            self._failure = type(error).__name__
        logger.error("%s could not be started: %s", traces.purpose, self._failure)
        await self.drop()
        self._retry_at = time.monotonic() + _PAUSE_S
        raise self._start_failure()

    def _start_failure(self) -> ApiError:
        return ApiError(
            ErrorCode.LOCAL_ENGINE_FAILED,
            f"The server could not start {self._traces.purpose}: {self._failure}. Its log has the details; "
            "other requests are served.",
        )

    async def drop(self) -> None:
        child, self.child, self._is_settled = self.child, None, True
        if child is not None:
            await child.close()

    async def _run_with_retry(self, job: ProcessJob) -> None:
        """Run a trace, on a second process if the first had ended before the trace began."""
        if job.cancelled.is_set():
            return
        for is_last in (False, True):
            try:
                await self._run_in(await self._ready_process(), job)
            except ProcessEndedError as error:
                await self.drop()
                if is_last or job.has_begun or job.cancelled.is_set():
                    raise self._process_ended(job, error) from error
            else:
                return

    async def _run_in(self, child: TraceProcess, job: ProcessJob) -> None:
        """Run a trace in a process until its last frame; ProcessEndedError also for an invalid message."""
        self._num_runs += 1
        number = self._num_runs
        started_at = time.monotonic()
        watch = asyncio.create_task(self._end_overdue(child, job, number))
        try:
            if not child.has_nothing_unread:
                raise ProcessEndedError(None)
            self._is_settled = False
            await child.run(number, job.request.chunks())
            while not await self._forward_frame(child, await child.frame(), job):
                pass
        except DecodeError as error:
            logger.warning("a trace made its process send an invalid message: %s", error)
            raise ProcessEndedError(None) from error
        finally:
            if job.meter is not None and self._traces.are_engines:
                job.meter.intervention_s += time.monotonic() - started_at
            try:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            finally:
                await job.end_request()

    async def _end_overdue(self, child: TraceProcess, job: ProcessJob, number: int) -> None:
        """Cancel a trace that nothing waits for or that exceeded its time, then kill the process."""
        try:
            async with asyncio.timeout(self._traces.time_limit_s):
                await job.cancelled.wait()
        except TimeoutError:
            job.is_late = True
        with contextlib.suppress(ProcessEndedError, TimeoutError):
            async with asyncio.timeout(CANCEL_GRACE_S):
                await child.send({CANCEL: number})
                await asyncio.sleep(CANCEL_GRACE_S)
        child.kill()

    async def _forward_frame(self, child: TraceProcess, frame: Frame, job: ProcessJob) -> bool:
        """Forward a valid frame to the client; return True for the last one, raise the trace's error.

        Raises DecodeError if the process violates the protocol, which code of a block can make it do.
        """
        if frame.kind is FrameKind.RESULT:
            job.frames.put_nowait(frame)
            job.frames.put_nowait(None)
            return True
        if len(frame.data) > _MAX_EVENT_BYTES:
            raise DecodeError("an event is too long")
        event = frame.json()
        if not isinstance(event, dict):
            raise DecodeError("an event is an object")
        if frame.kind is FrameKind.ERROR:
            raise self._trace_error(event, job)
        await self._on_event(child, event, job)
        return False

    async def _on_event(self, child: TraceProcess, event: dict[str, Any], job: ProcessJob) -> None:
        """Pass a state or a print on to the client; serve another event as a request of the process."""
        status = event.get("status")
        if status == JobStatus.RUNNING:
            if not job.has_begun:
                job.notify(JobStatus.RUNNING)
            job.has_begun = True
        elif status in {JobStatus.LOG, JobStatus.ERROR}:
            job.num_prints += 1
            if job.num_prints > _MAX_PRINTS:
                raise DecodeError("a trace sends events faster than its client reads them")
            job.notify(JobStatus(status), str(event.get("message", "")))
        else:
            await self._traces.serve_request(child, event, job)

    def _trace_error(self, event: dict[str, Any], job: ProcessJob) -> ApiError:
        """Return the error that a process reports as the client may see it."""
        error = event.get("error")
        error = error if isinstance(error, dict) else {}
        if error.get("code") == ErrorCode.INVALID_TRACE:
            return ApiError(ErrorCode.INVALID_TRACE, str(error.get("message", "")))
        return self._timed_out() if job.is_late else internal_error()

    def _process_ended(self, job: ProcessJob, error: ProcessEndedError) -> ApiError:
        if job.is_late:
            return self._timed_out()
        return ApiError(
            ErrorCode.TRACE_PROCESS_ENDED,
            f"The process that ran the trace has ended: {error}. Possible causes are a block that runs out "
            "of memory or ends its process; the server has started another one.",
        )

    def _timed_out(self) -> ApiError:
        return ApiError(
            ErrorCode.TRACE_TIMED_OUT,
            f"A trace may run for {self._traces.time_limit_s:g} s (trace_time_limit_s), and this one was "
            "ended then; split it, or shorten it.",
        )


async def _receive_status(child: TraceProcess) -> dict[str, Any]:
    """Return a process's next message, which is about its own state and not about a trace."""
    message = (await child.frame()).json()
    if not isinstance(message, dict):
        raise DecodeError("the first message of a trace process must be an object")
    return message
