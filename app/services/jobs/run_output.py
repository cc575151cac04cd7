"""The frames of one run of a job: events go to the database, the final frames to the result's file.

Prints count against the storage limits of jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobEvent, JobStatus
from app.storage.jobs.files import ResultFile
from app.storage.jobs.states import JobEnd, now, size_of
from app.storage.jobs.store import JobStore, LeaseLostError
from app.storage.quotas import DiskQuota
from app.storage.tables import JobRow
from nnsight_engine.remote_backend.frames import Frame, FrameKind

_MAX_PENDING: Final = 500
_MAX_LINES: Final = 10_000
_MAX_CHARS: Final = 16 * 2**20
_NOT_KEPT: Final = "… (what the block prints from here on is not kept{why})"


class RunEvents:
    """The events of one run, written in order; those that arrive during a write go into the next batch."""

    def __init__(self, job: JobRow, store: JobStore, space: DiskQuota) -> None:
        self._job = job
        self._store = store
        self._space = space
        self._pending: list[JobEvent] = []
        self._writing: asyncio.Task[None] | None = None
        self._num_lines = 0
        self._num_chars = 0
        self._num_reserved = 0
        self._is_full = False

    async def add(self, event: JobEvent) -> None:
        """Queue an event; waits only while the backlog is long. Raises LeaseLostError.

        Other write errors do not end a job: the events are written with the next batch, or by ``settle``.
        """
        writing = self.put(event)
        if len(self._pending) >= _MAX_PENDING:
            await asyncio.wait([writing])
        if writing.done() and isinstance(writing.exception(), LeaseLostError):
            writing.result()

    async def add_line(self, event: JobEvent) -> None:
        """Add a printed line; the first one beyond a limit becomes a notice, and further ones are dropped."""
        if self._is_full:
            return
        self._num_lines += 1
        self._num_chars += len(event.message or "")
        why = ""
        if self._num_lines > _MAX_LINES or self._num_chars > _MAX_CHARS:
            self._is_full = True
        else:
            num_bytes = size_of([event])
            try:
                self._space.take(num_bytes, self._job.holder)
            except ApiError as error:
                self._is_full, why = True, f": {error.message}"
            else:
                self._num_reserved += num_bytes
        if self._is_full:
            event.message = _NOT_KEPT.format(why=why)
        await self.add(event)

    def put(self, event: JobEvent) -> asyncio.Task[None]:
        """Queue an event, and return the task that writes it; a failed one is replaced if the lease holds."""
        self._pending.append(event)
        writing = self._writing
        if writing is None or (writing.done() and not isinstance(writing.exception(), LeaseLostError)):
            self._writing = writing = asyncio.create_task(self._drain())
        return writing

    async def settle(self) -> None:
        """Wait until all events are written; raises the write's error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing
        await self._drain()

    def count(self, events: Sequence[JobEvent]) -> None:
        """Count events that are written."""
        num_bytes = size_of(events)
        self._give_up(min(num_bytes, self._num_reserved))
        self._space.add(num_bytes, self._job.holder)

    def close(self) -> None:
        """Release the space that is reserved for lines that were not written; idempotent."""
        self._give_up(self._num_reserved)

    def _give_up(self, num_bytes: int) -> None:
        self._num_reserved -= num_bytes
        self._space.give_up(num_bytes, self._job.holder)

    async def _drain(self) -> None:
        while batch := self._pending[:]:
            await self._store.append_events(self._job, batch)
            self.count(batch)
            # Deleted only after the write: events that could not be written stay pending.
            del self._pending[: len(batch)]


_ACCEPTED_S: Final = 0.2
"""An engine that has not refused a job within this time has accepted it, even if it sends no frame yet."""

_BUSY: Final = "The engine's own queue is full; the job waits until it has room."


class RunOutput:
    """``accepted`` is called when the engine has accepted the trace."""

    def __init__(self, events: RunEvents, result: ResultFile, accepted: Callable[[], None]) -> None:
        self._events = events
        self._result = result
        self._accepted = accepted
        self._dispatched: JobEvent | None = None
        self._was_busy = False
        self._has_result = False
        self._failure: JobEnd | None = None

    @property
    def end(self) -> JobEnd:
        """How the job has ended, once the engine has sent everything."""
        failure = self._failure
        if not self._has_result:
            return failure or JobEnd(
                JobStatus.ERROR, "The engine ended the trace without a result.", ErrorCode.INTERNAL
            )
        if failure is None:
            return JobEnd(JobStatus.COMPLETED, result_bytes=self._result.num_bytes)
        return JobEnd(failure.status, failure.message, failure.code, self._result.num_bytes)

    async def store_all(self, frames: AsyncGenerator[Frame, None]) -> None:
        """Raise ApiError if the engine does not take the trace or has failed, LeaseLostError."""
        # The first frame is the service's own and precedes the engine's answer. The job counts as dispatched
        # only once the engine has accepted it.
        self._dispatched = JobEvent.model_validate_json(bytes((await anext(frames)).data))
        timer = asyncio.get_running_loop().call_later(_ACCEPTED_S, self._report_dispatched)
        try:
            async for frame in frames:
                self._report_dispatched()
                if frame.kind is FrameKind.ERROR:
                    self._has_result = False
                    self._failure = _failure_of(frame.json())
                    return
                await self._store_frame(frame)
        finally:
            timer.cancel()

    def report_busy(self) -> None:
        """Report that the engine's queue is full, if that is news."""
        if not self._was_busy or self._dispatched is None:
            self._events.put(now(JobStatus.QUEUED, _BUSY))
        self._was_busy = True

    def _report_dispatched(self) -> None:
        event, self._dispatched = self._dispatched, None
        if event is not None:
            self._events.put(event)
            self._accepted()

    async def _store_frame(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.EVENT:
                await self._store_event(JobEvent.model_validate_json(bytes(frame.data)))
            case FrameKind.OUTPUTS:
                await self._result.write(frame)
            case FrameKind.RESULT:
                await self._result.write(frame)
                self._has_result = True
            case _:
                pass  # only for a client that follows the trace as it runs

    async def _store_event(self, event: JobEvent) -> None:
        event.time = event.time or time.time()
        if event.status is JobStatus.ERROR:
            # A block's exception: the result that contains it follows, and the job ends only then.
            self._failure = JobEnd(JobStatus.ERROR, event.message, ErrorCode.BLOCK_FAILED)
        elif event.status is JobStatus.LOG:
            await self._events.add_line(event)
        elif not event.status.is_final and event.status is not JobStatus.RECEIVED:
            await self._events.add(event)


def _failure_of(body: Any) -> JobEnd:
    try:
        info = body["error"]
        return JobEnd(JobStatus.ERROR, str(info["message"]), str(info["code"])[:64])
    except (KeyError, TypeError):
        return JobEnd(JobStatus.ERROR, "The engine failed without a reason.", ErrorCode.INTERNAL)
