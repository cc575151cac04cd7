"""One run of a job: its trace on an engine, its events and result, and the record of how it ended.

Invariant: a result is complete on disk before its job is recorded as ended, and a job that did not finish has
no result. Only the final frames are stored, the ones that ``POST /v1/traces`` would send last.
Prints count against the storage limits of jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

import msgspec

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobEvent, JobStatus
from app.admission.counters import Reservation
from app.admission.estimates import of_trace
from app.admission.rates import Rates
from app.audit import AuditLog, Record
from app.auth.keys import Keys
from app.auth.principal import ANONYMOUS, Principal, sandbox_of
from app.engine.served_model import ServedModel
from app.http.contexts import RequestContext
from app.http.errors import internal_error
from app.http.lifecycle import Lifecycle
from app.limits.tenant_budget import TenantBudget
from app.services.jobs.feed import JobFeed
from app.services.jobs.local_calls import LocalCalls
from app.services.traces import TraceService, check_still_allowed
from app.settings import Settings
from app.storage.database import Database, job_folder
from app.storage.jobs.files import JobFiles, ResultFile
from app.storage.jobs.states import CANCELLED, JobEnd, now, size_of
from app.storage.jobs.store import MAX_INTERRUPTIONS, JobKind, JobStore, LeaseLostError, kind_of
from app.storage.quotas import StoredBytes, StoredQuotas
from app.storage.tables import JobRow
from nnsight_engine.core.work_context import UsageMeter
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.serialization import DecodeError

_MAX_PENDING: Final = 500
_MAX_LINES: Final = 10_000
_MAX_CHARS: Final = 16 * 2**20
_NOT_KEPT: Final = "… (what the block prints from here on is not kept{why})"


class RunEvents:
    """The events of one run, written in order; those that arrive during a write go into the next batch."""

    def __init__(self, job: JobRow, store: JobStore, space: StoredBytes) -> None:
        self._job = job
        self._store = store
        self._space = space
        self._pending: list[JobEvent] = []
        self._writing: asyncio.Task[None] | None = None
        self._num_lines = 0
        self._num_chars = 0
        self._reserved = space.spend(job.holder)
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
            try:
                self._reserved.add(size_of([event]))
            except ApiError as error:
                self._is_full, why = True, f": {error.message}"
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
        self._reserved.release(num_bytes)
        self._space.store(num_bytes, self._job.holder)

    def close(self) -> None:
        """Release the space that is reserved for lines that were not written; idempotent."""
        self._reserved.close()

    async def _drain(self) -> None:
        """Write the pending events in batches until there are none."""
        while batch := self._pending[:]:
            await self._store.append_events(self._job, batch)
            self.count(batch)
            # Deleted only after the write: events that could not be written stay pending.
            del self._pending[: len(batch)]


_ACCEPTED_S: Final = 0.2
"""An engine that has not refused a job within this time has accepted it, even if it sends no frame yet."""

_BUSY: Final = "The engine's own queue is full; the job waits until it has room."


class RunOutput:
    """Stores what an engine sends of a job; ``accepted`` is called when it has accepted the trace."""

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
        """Write the event that the job is on the engine, which is held back until the engine accepts it."""
        event, self._dispatched = self._dispatched, None
        if event is not None:
            self._events.put(event)
            self._accepted()

    async def _store_frame(self, frame: Frame) -> None:
        """Write the frames of the result to its file, and events to the database."""
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
        """Write an event; a failure is kept for ``end``, and the job's end is written by its run."""
        event.time = event.time or time.time()
        if event.status is JobStatus.ERROR:
            # A block's exception: the result that contains it follows, and the job ends only then.
            self._failure = JobEnd(JobStatus.ERROR, event.message, ErrorCode.BLOCK_FAILED)
        elif event.status is JobStatus.LOG:
            await self._events.add_line(event)
        elif not event.status.is_final and event.status is not JobStatus.RECEIVED:
            await self._events.add(event)


def _failure_of(body: Any) -> JobEnd:
    """Return the end of a job whose engine has sent an ``ERROR`` frame with this body."""
    try:
        info = body["error"]
        return JobEnd(JobStatus.ERROR, str(info["message"]), str(info["code"])[:64])
    except (KeyError, TypeError):
        return JobEnd(JobStatus.ERROR, "The engine failed without a reason.", ErrorCode.INTERNAL)


logger = logging.getLogger(__name__)

RunOver = Callable[[JobStatus | None], None]
"""Called when a run is over: with its final status, None if it is to run again."""

_BUSY_DELAYS_S: Final = (1.0, 2.0, 5.0)
"""Delays before a job retries an engine whose queue is full; the last one repeats."""

_NO_REQUEST: Final = (
    "The job's request on the server's disk is missing or damaged; send the trace as a new job."
)
_NO_ENGINE: Final = frozenset({ErrorCode.STARTING, ErrorCode.ENGINE_RESTARTING})
"""Errors of an engine that was not available when the job was sent to it, so that nothing has run."""

_TO_RUN_AGAIN: Final = "to_run_again"
_RETRY_DELAYS_S: Final = (0.5, 1.5, 4.0)


class Ending(enum.Enum):
    """Why a run is ended from outside, before its trace is over."""

    CANCELLED = enum.auto()
    STOPPED = enum.auto()
    """The server stops; the job runs again later."""
    LOST = enum.auto()
    """Another server runs the job."""


@dataclasses.dataclass(slots=True, kw_only=True)
class JobParts:
    """What a server accepts, runs and shows jobs with.

    ``watch`` is called before a run begins, with its context and the queuing request's ``traceparent``.
    """

    settings: Settings
    database: Database
    lifecycle: Lifecycle
    served: Callable[[], ServedModel]
    traces: TraceService
    keys: Keys
    rates: Rates
    quotas: StoredQuotas
    log: AuditLog
    watch: Callable[[RequestContext, str], RunOver]
    files: JobFiles = dataclasses.field(init=False)
    store: JobStore = dataclasses.field(init=False)
    feed: JobFeed = dataclasses.field(init=False)
    calls: LocalCalls = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        budget, ttl_s = TenantBudget.of(self.settings), self.settings.job_ttl_s
        self.files = JobFiles(job_folder(self.settings), StoredBytes(budget.job_bytes, self.quotas))
        self.store = JobStore(self.database, self.files.process, waiting=budget.waiting_jobs, ttl_s=ttl_s)
        self.feed = JobFeed(self.store)
        self.calls = LocalCalls(self.settings.local_block_timeout_s)


class JobRun:
    """One attempt at a job, for the holder of its key; None if the key has ended, which ends the job.

    It has one of ``slots``, except while it waits for an engine whose queue is full: ``waits_for``.
    ``wake`` is called when more jobs may be claimed than before. ``ended`` is None before the end, and if the
    job is to run again.
    """

    def __init__(
        self,
        job: JobRow,
        caller: Principal | None,
        parts: JobParts,
        slots: asyncio.Semaphore,
        wake: Callable[[], None],
    ) -> None:
        self.job = job
        self.caller = caller or ANONYMOUS
        self.context = RequestContext(
            tenant=job.owner, meter=UsageMeter(job.key_id), record=run_record(job), principal=self.caller
        )
        self.reserved: list[Reservation] = []
        self.waits_for: JobKind | None = None
        self.ended: JobStatus | None = None
        self._refusal = _key_ended(job) if caller is None else None
        self._parts = parts
        self._slots = slots
        self._has_slot = True
        self._wake = wake
        self._events = RunEvents(job, parts.store, parts.files.space)
        self._result = parts.files.new_result(job)
        self._output = RunOutput(self._events, self._result, self._note_accepted)
        self._task: asyncio.Task[None] | None = None
        self._ending: Ending | None = None
        self._is_over = False
        self._was_interrupted = False
        self._is_unsure = False  # whether a failed write may have recorded the end

    def end_early(self, ending: Ending) -> None:
        """End the run now; no effect once its end is being recorded. Idempotent."""
        if self._is_over or self._ending is not None:
            return
        self._ending = ending
        if self._task is not None:
            self._task.cancel()

    def release_slot(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._slots.release()

    async def run(self) -> None:
        """Run the job and record its end; raises the error of a database that does not take it."""
        self._task = asyncio.current_task()
        if self._ending is not None and self._task is not None:
            self._task.cancel()  # it was ended before its first step
        result, has_result = self._result, False
        self._parts.log.register(self.context.record)
        try:
            end = await self._run_to_end()
            has_result = end is not None and end.result_bytes is not None
            if not has_result:
                await result.discard()  # on a full disk, the database may need this space
            await self._record_end(end)
            result.keep()
            self._record_run(end)
        except LeaseLostError:
            logger.warning("job %s now runs on another server, which considered this one dead", self.job.id)
            has_result &= self._is_unsure
            self._record_run(None)
        finally:
            self._parts.log.drop(self.context.record)
            self._events.close()
            if has_result:
                result.leave()
            else:
                await result.discard()

    def _record_run(self, end: JobEnd | None) -> None:
        """Complete the run's record for the audit log; ``end`` is None if the job is to run again."""
        record = self.context.record
        record.step_tier = self.context.tier
        self.ended = None if end is None else end.status
        record.duration_s = time.time() - record.time
        record.request_bytes = self.job.request_bytes
        record.add_use(self.context.meter)
        if end is None:
            record.error = _TO_RUN_AGAIN
        else:
            record.error = end.code or ""
            record.response_bytes = end.result_bytes or 0
            record.details = {"status": end.status.value}
        if record.tenant:
            self._parts.log.add(record)

    async def _run_to_end(self) -> JobEnd | None:
        """Run the trace and return how it ended, with its result on disk; None if it is to run again."""
        try:
            await self._run_attempts()
            self._is_over = True  # a whole result is not given up while it is written to the disk
            end = self._output.end
            if end.result_bytes is not None:
                await self._result.finish()
        except asyncio.CancelledError:
            return self._end_after_cancellation()
        except ApiError as error:
            # An engine may raise its own error when it is cancelled.
            return self._end_after_refusal(error) if self._ending is None else self._end_after_cancellation()
        except LeaseLostError:
            raise
        except Exception:
            logger.exception("job %s failed because of an internal error", self.job.id)
            return self._end_after_refusal(internal_error())
        finally:
            self._is_over = True
        return end

    async def _run_attempts(self) -> None:
        """Run the trace to its end, again while the engine's queue is full; raises ApiError otherwise."""
        request = await self._read_request()
        for attempt in itertools.count():
            try:
                frames = self._parts.traces.run(request, self.job.id, self.context.meter)
                async with contextlib.aclosing(frames):
                    await self._output.store_all(frames)
            except ApiError as error:
                if error.code is not ErrorCode.QUEUE_FULL:
                    raise
                await self._wait_for_engine(_BUSY_DELAYS_S[min(attempt, len(_BUSY_DELAYS_S) - 1)])
            else:
                return

    async def _read_request(self) -> TraceRequest:
        """Return the trace to be run, and reserve the usage that it declares; raises ApiError."""
        if self._refusal is not None:
            raise self._refusal
        parts = self._parts
        try:
            request = await parts.files.request(self.job.id)
        except (OSError, DecodeError) as error:
            logger.exception("the request of job %s cannot be read", self.job.id)
            raise ApiError(ErrorCode.INTERNAL, _NO_REQUEST) from error
        await self.context.record.note_trace(request)
        check_still_allowed(parts.settings, request.head)
        parts.served().check(request.head)
        self.reserved = await parts.rates.reserve_unchecked(self.caller, of_trace(request.head))
        # No client reads outputs as they are produced, so the engine need not send them.
        request.head = msgspec.structs.replace(request.head, streams=False)
        request.sandbox_of = sandbox_of(parts.settings, self.caller)
        request.tenant = self.job.owner
        request.sender = f"jobs of {self.job.owner!r}"
        request.may_exceed_queue = True  # bounded by the owner's share of the running jobs
        request.call_client = functools.partial(parts.calls.call, self.job.id)
        return request

    async def _wait_for_engine(self, delay_s: float) -> None:
        """Wait for a busy engine without a slot, and take one again."""
        # No more jobs of its kind are claimed meanwhile: they would only wait with it, out of order.
        self._output.report_busy()
        self.waits_for = kind_of(self.job)
        self.release_slot()
        self._wake()
        await asyncio.sleep(delay_s)
        await self._slots.acquire()
        self._has_slot = True

    def _note_accepted(self) -> None:
        """Let jobs of this kind be claimed again, if this one has waited for the engine."""
        if self.waits_for is not None:
            self.waits_for = None
            self._wake()

    def _end_after_refusal(self, error: ApiError) -> JobEnd | None:
        """Return how a job ended that its engine did not run to the end; None if it is to run again."""
        if error.code in _NO_ENGINE:
            return None
        self._was_interrupted = error.code is ErrorCode.ENGINE_DEAD
        if self._was_interrupted and self.job.reruns and self.job.num_interruptions + 1 < MAX_INTERRUPTIONS:
            return None
        return JobEnd(JobStatus.ERROR, error.message, error.code)

    def _end_after_cancellation(self) -> JobEnd | None:
        """Return how a cancelled job ended; re-raises the cancellation if the event loop is stopping."""
        if self._ending is None:
            raise asyncio.CancelledError
        if self._task is not None:
            self._task.uncancel()
        if self._ending is Ending.LOST:
            raise LeaseLostError(self.job.id)
        return None if self._ending is Ending.STOPPED else CANCELLED

    async def _record_end(self, end: JobEnd | None) -> None:
        """Retry if the database fails, since the run cannot be repeated.

        Raises LeaseLostError if the job is no longer ours or, where ``_is_unsure``, may already be recorded.
        """
        for delay_s in (*_RETRY_DELAYS_S, None):
            try:
                await self._record_end_once(end)
            except LeaseLostError:
                raise
            except Exception:
                if delay_s is None:
                    raise
                logger.exception("the end of job %s could not be recorded; retrying", self.job.id)
                self._is_unsure = True
                await asyncio.sleep(delay_s)
            else:
                return

    async def _record_end_once(self, end: JobEnd | None) -> None:
        """Write all events, then the end; None puts the job back into the queue."""
        await self._events.settle()
        if end is None:
            await self._parts.store.requeue(self.job, has_begun=True, was_interrupted=self._was_interrupted)
        else:
            self._events.count([await self._parts.store.end(self.job, end)])


def run_record(job: JobRow, error: str = "") -> Record:
    """Return the record of a job's run, for the audit log."""
    return Record(
        "RUN", "/v1/jobs/{job_id}", job.owner, job.key_id, subject=job.id, model=job.model, error=error
    )


def _key_ended(job: JobRow) -> ApiError:
    return ApiError(
        ErrorCode.KEY_ENDED,
        f"The key {job.key_id!r}, which sent this job, ended before the job's turn came; run it again with "
        f"another of the tenant's keys, POST /v1/jobs/{job.id}/rerun.",
    )
