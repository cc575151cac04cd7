"""The frames of one run of a job: events go to the database, the final frames to the result's file.

Prints count against the storage limits of jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobEvent, JobStatus
from app.services.jobs.slots import JobSlot
from app.storage.jobs.files import JobFiles, ResultFile
from app.storage.jobs.leases import JobEnd, JobLeases, LeaseLostError, kind_of
from app.storage.jobs.states import now, size_of
from app.storage.quotas import DiskQuota, Holder
from app.storage.tables import JobRow
from nnsight_engine.remote_backend.frames import Frame, FrameKind

_MAX_PENDING: Final = 500
_MAX_LINES: Final = 10_000
_MAX_CHARS: Final = 16 * 2**20
_NOT_KEPT: Final = "… (what the block prints from here on is not kept{why})"


class JobPrints:
    def __init__(self, space: DiskQuota, holder: Holder) -> None:
        self._space = space
        self._holder = holder
        self._num_lines = 0
        self._num_chars = 0
        self._num_taken = 0
        self._is_full = False

    def admit(self, event: JobEvent) -> bool:
        """Return whether a printed line is written; the first line beyond a limit becomes a notice."""
        if self._is_full:
            return False
        self._num_lines += 1
        self._num_chars += len(event.message or "")
        if self._num_lines > _MAX_LINES or self._num_chars > _MAX_CHARS:
            self._end_with(event)
            return True
        num_bytes = size_of([event])
        try:
            self._space.take(num_bytes, self._holder)
        except ApiError as error:
            self._end_with(event, f": {error.message}")
        else:
            self._num_taken += num_bytes
        return True

    def _end_with(self, event: JobEvent, why: str = "") -> None:
        self._is_full = True
        event.message = _NOT_KEPT.format(why=why)

    def written(self, events: Sequence[JobEvent]) -> None:
        num_bytes = size_of(events)
        self._give_up(min(num_bytes, self._num_taken))
        self._space.add(num_bytes, self._holder)

    def close(self) -> None:
        """Release the reservation of lines that were not written; idempotent."""
        self._give_up(self._num_taken)

    def _give_up(self, num_bytes: int) -> None:
        self._num_taken -= num_bytes
        self._space.give_up(num_bytes, self._holder)


class EventWriter:
    """Writes the events of one run in order; those that arrive during a write go into the next batch."""

    def __init__(self, write: Callable[[list[JobEvent]], Awaitable[None]]) -> None:
        self._write = write
        self._pending: list[JobEvent] = []
        self._writing: asyncio.Task[None] | None = None

    async def add(self, event: JobEvent) -> None:
        """Queue an event; waits only while the backlog is long. Raises LeaseLostError.

        Other write errors do not end a job: the events are written with the next batch, or by ``settle``.
        """
        writing = self.put(event)
        if len(self._pending) >= _MAX_PENDING:
            await asyncio.wait([writing])
        if writing.done() and isinstance(writing.exception(), LeaseLostError):
            writing.result()

    def put(self, event: JobEvent) -> asyncio.Task[None]:
        self._pending.append(event)
        before = self._writing
        if before is None or (before.done() and not isinstance(before.exception(), LeaseLostError)):
            self._writing = before = asyncio.create_task(self._drain())
        return before

    async def settle(self) -> None:
        """Wait until all events are written; raises the write's error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing
        await self._drain()

    async def _drain(self) -> None:
        while batch := self._pending[:]:
            await self._write(batch)
            # Deleted only after the write: events that could not be written stay pending.
            del self._pending[: len(batch)]


_TAKEN_S: Final = 0.2
"""An engine that has not refused a job within this time has accepted it, even if it sends no frame yet."""

_BUSY: Final = "The engine's own queue is full; the job waits until it has room."


class RunOutput:
    def __init__(
        self,
        job: JobRow,
        slot: JobSlot,
        *,
        files: JobFiles,
        leases: JobLeases,
        notify_followers: Callable[[str], None],
    ) -> None:
        self.result: ResultFile = files.new_result(job.id, job.attempt, job.holder)
        self._job = job
        self._slot = slot
        self._leases = leases
        self._notify_followers = notify_followers
        self._events = EventWriter(self._append_events)
        self._prints = JobPrints(files.space, job.holder)
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
            return JobEnd(JobStatus.COMPLETED, result_bytes=self.result.num_bytes)
        return JobEnd(failure.status, failure.message, failure.code, self.result.num_bytes)

    async def take_all(self, frames: AsyncGenerator[Frame, None]) -> None:
        """Raise ApiError if the engine does not take the trace or has failed, LeaseLostError."""
        # The first frame is the service's own and precedes the engine's answer. The job counts as dispatched
        # only once the engine has accepted it.
        self._dispatched = JobEvent.model_validate_json(bytes((await anext(frames)).data))
        timer = asyncio.get_running_loop().call_later(_TAKEN_S, self._report_dispatched)
        try:
            async for frame in frames:
                self._report_dispatched()
                if frame.kind is FrameKind.ERROR:
                    self._has_result = False
                    self._failure = _failure_of(frame.json())
                    return
                await self._take(frame)
        finally:
            timer.cancel()

    async def wait_for_engine(self, delay_s: float) -> None:
        """Give up the slot for a while, since the engine's queue is full, and report it if that is news."""
        if not self._was_busy or self._dispatched is None:
            self._events.put(now(JobStatus.QUEUED, _BUSY))
        self._was_busy = True
        await self._slot.wait(kind_of(self._job), delay_s)

    async def settle(self) -> None:
        await self._events.settle()

    def count_end(self, event: JobEvent) -> None:
        self._prints.written([event])

    def close(self) -> None:
        """Release the space that was reserved for events; idempotent."""
        self._prints.close()

    def _report_dispatched(self) -> None:
        event, self._dispatched = self._dispatched, None
        if event is not None:
            self._events.put(event)
            self._slot.accepted()

    async def _take(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.EVENT:
                await self._take_event(JobEvent.model_validate_json(bytes(frame.data)))
            case FrameKind.OUTPUTS:
                await self.result.write(frame)
            case FrameKind.RESULT:
                await self.result.write(frame)
                self._has_result = True
            case _:
                pass  # only for a client that follows the trace as it runs

    async def _take_event(self, event: JobEvent) -> None:
        event.time = event.time or time.time()
        if event.status is JobStatus.ERROR:
            # A block's exception: the result that contains it follows, and the job ends only then.
            self._failure = JobEnd(JobStatus.ERROR, event.message, ErrorCode.BLOCK_FAILED)
        elif event.status is JobStatus.LOG:
            if self._prints.admit(event):
                await self._events.add(event)
        elif not event.status.is_final and event.status is not JobStatus.RECEIVED:
            await self._events.add(event)

    async def _append_events(self, events: list[JobEvent]) -> None:
        await self._leases.append_events(self._job, events)
        self._prints.written(events)
        self._notify_followers(self._job.id)


def _failure_of(body: Any) -> JobEnd:
    try:
        info = body["error"]
        return JobEnd(JobStatus.ERROR, str(info["message"]), str(info["code"])[:64])
    except (KeyError, TypeError):
        return JobEnd(JobStatus.ERROR, "The engine failed without a reason.", ErrorCode.INTERNAL)
