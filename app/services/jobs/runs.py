"""One run of a job: its trace on an engine, and the record of how it ended.

Invariant: a result is complete on disk before its job is recorded as ended, and a job that did not finish has
no result. Only the final frames are stored, the ones that ``POST /v1/traces`` would send last.
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
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.admission.estimates import Estimate, of_trace
from app.audit import AuditLog, Record
from app.http.contexts import RequestContext
from app.http.errors import internal_error
from app.services.jobs.local_calls import LocalCalls
from app.services.jobs.run_output import RunOutput
from app.services.jobs.slots import JobSlot
from app.services.traces import TraceService
from app.storage.jobs.files import JobFiles
from app.storage.jobs.leases import MAX_INTERRUPTIONS, JobEnd, JobLeases, LeaseLostError
from app.storage.jobs.states import CANCELLED_MESSAGE
from app.storage.tables import JobRow
from nnsight_engine.core.work_context import UsageMeter
from nnsight_engine.remote_backend.messages import TraceHead
from nnsight_engine.serialization import DecodeError

logger = logging.getLogger(__name__)

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
    CANCELLED = enum.auto()
    STOPPED = enum.auto()
    """The server stops; the job runs again later."""
    LOST = enum.auto()
    """Another server runs the job."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobTools:
    """The services of all runs; ``check`` raises ApiError for a trace that may no longer run."""

    traces: TraceService
    files: JobFiles
    leases: JobLeases
    check: Callable[[TraceHead], None]
    notify_followers: Callable[[str], None]
    calls: LocalCalls
    log: AuditLog


class JobRun:
    """One attempt at a job; ``ended`` is None before the end, and if the job is to run again.

    Args:
        refusal: The error to end the job with instead of running it.
        sandbox_of: The tenant in whose sandbox it runs; None if it runs in the engine's own process.
        reserve: Called once with the usage that the trace declares.
    """

    def __init__(
        self,
        job: JobRow,
        tools: JobTools,
        slot: JobSlot,
        *,
        sandbox_of: str | None,
        refusal: ApiError | None = None,
        reserve: Callable[[Estimate], Awaitable[None]] | None = None,
    ) -> None:
        self._job = job
        self._sandbox_of = sandbox_of
        self._tools = tools
        self._refusal = refusal
        self.context = RequestContext(tenant=job.owner, meter=UsageMeter(job.key_id), record=run_record(job))
        self.ended: JobStatus | None = None
        self._reserve = reserve
        self._output = RunOutput(
            job,
            slot,
            files=tools.files,
            leases=tools.leases,
            notify_followers=tools.notify_followers,
        )
        self._task: asyncio.Task[None] | None = None
        self._ending: Ending | None = None
        self._is_over = False
        self._was_interrupted = False
        self._is_unsure = False

    @property
    def owner(self) -> str:
        return self._job.owner

    def end_early(self, ending: Ending) -> None:
        """End the run now; no effect once its end is being recorded. Idempotent."""
        if self._is_over or self._ending is not None:
            return
        self._ending = ending
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        if self._ending is not None and self._task is not None:
            self._task.cancel()  # it was ended before its first step
        result, has_result = self._output.result, False
        self._tools.log.begin(self.context.record)
        try:
            end = await self._finished(await self._end())
            has_result = end is not None and end.result_bytes is not None
            if not has_result:
                await result.discard()  # on a full disk, the database may need this space
            await self._record_end(end)
            result.keep()
            self._record_run(end)
        except LeaseLostError:
            logger.warning("job %s now runs on another server, which considered this one dead", self._job.id)
            has_result &= self._is_unsure
            self._record_run(None)
        finally:
            self._tools.log.drop(self.context.record)
            self._output.close()
            try:
                if has_result:
                    result.leave()
                else:
                    await result.discard()
            finally:
                self._tools.notify_followers(self._job.id)

    def _record_run(self, end: JobEnd | None) -> None:
        record = self.context.record
        record.tier = self.context.tier
        self.ended = None if end is None else end.status
        record.duration_s = time.time() - record.time
        record.request_bytes = self._job.request_bytes
        record.add_use(self.context.meter)
        if end is None:
            record.error = _TO_RUN_AGAIN
        else:
            record.error = end.code or ""
            record.response_bytes = end.result_bytes or 0
            record.details = {"status": end.status.value}
        if record.tenant:
            self._tools.log.add(record)

    async def _finished(self, end: JobEnd | None) -> JobEnd | None:
        """Return how the job ended, once its result is flushed to disk; an error if that fails."""
        if end is None or end.result_bytes is None:
            return end
        try:
            await self._output.result.finish()
        except ApiError as error:
            return self._refused(error)
        return end

    async def _end(self) -> JobEnd | None:
        """Run the trace and return how it ended; None if it is to run again."""
        try:
            await self._run_attempts()
        except asyncio.CancelledError:
            return self._ended_early()
        except ApiError as error:
            # An engine may raise its own error when it is cancelled.
            return self._refused(error) if self._ending is None else self._ended_early()
        except LeaseLostError:
            raise
        except Exception:
            logger.exception("job %s failed because of an internal error", self._job.id)
            return self._refused(internal_error())
        finally:
            self._is_over = True
        return self._output.end

    async def _run_attempts(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        try:
            request = await self._tools.files.request(self._job.id)
        except (OSError, DecodeError) as error:
            logger.exception("the request of job %s cannot be read", self._job.id)
            raise ApiError(ErrorCode.INTERNAL, _NO_REQUEST) from error
        await self.context.record.note_trace(request)
        self._tools.check(request.head)
        if self._reserve is not None:
            await self._reserve(of_trace(request.head))
        # No client reads outputs as they are produced, so the engine need not send them.
        request.head = msgspec.structs.replace(request.head, streams=False)
        request.sandbox_of = self._sandbox_of
        request.tenant = self._job.owner
        request.sender = f"jobs of {self._job.owner!r}"
        request.may_exceed_queue = True  # bounded by the owner's share of the running jobs
        request.call_client = functools.partial(self._tools.calls.call, self._job.id)
        for count in itertools.count():
            try:
                frames = self._tools.traces.run(request, self._job.id, self.context.meter)
                async with contextlib.aclosing(frames):
                    await self._output.take_all(frames)
            except ApiError as error:
                # The engine's queue is full of other traces: a job waits and retries.
                if error.code is not ErrorCode.QUEUE_FULL:
                    raise
                await self._output.wait_for_engine(_BUSY_DELAYS_S[min(count, len(_BUSY_DELAYS_S) - 1)])
            else:
                return

    def _refused(self, error: ApiError) -> JobEnd | None:
        """Return how a job ended that its engine did not run to the end; None if it is to run again."""
        if error.code in _NO_ENGINE:
            return None
        self._was_interrupted = error.code is ErrorCode.ENGINE_DEAD
        if self._was_interrupted and self._job.reruns and self._job.num_interruptions + 1 < MAX_INTERRUPTIONS:
            return None
        return JobEnd(JobStatus.ERROR, error.message, error.code)

    def _ended_early(self) -> JobEnd | None:
        """Return how a cancelled job ended; re-raises the cancellation if the event loop is stopping."""
        if self._ending is None:
            raise asyncio.CancelledError
        if self._task is not None:
            self._task.uncancel()
        if self._ending is Ending.LOST:
            raise LeaseLostError(self._job.id)
        if self._ending is Ending.STOPPED:
            return None
        return JobEnd(JobStatus.CANCELLED, CANCELLED_MESSAGE, ErrorCode.JOB_CANCELLED)

    async def _record_end(self, end: JobEnd | None) -> None:
        """Retry if the database fails, since the run cannot be repeated.

        Raises LeaseLostError if the job is no longer ours or, where ``_is_unsure``, may already be recorded.
        """
        for delay_s in _RETRY_DELAYS_S:
            try:
                await self._record_end_once(end)
            except LeaseLostError:
                raise
            except Exception:
                logger.exception("the end of job %s could not be recorded; retrying", self._job.id)
                self._is_unsure = True
            else:
                return
            await asyncio.sleep(delay_s)
        await self._record_end_once(end)

    async def _record_end_once(self, end: JobEnd | None) -> None:
        await self._output.settle()
        if end is None:
            await self._tools.leases.give_back(self._job, was_interrupted=self._was_interrupted)
        else:
            self._output.count_end(await self._tools.leases.end(self._job, end))


def run_record(job: JobRow, error: str = "") -> Record:
    return Record(
        "RUN", "/v1/jobs/{job_id}", job.owner, job.key_id, subject=job.id, model=job.model, error=error
    )


def record_interrupted(jobs: Sequence[JobRow], log: AuditLog) -> None:
    """Write audit records for tenants' jobs that ran on servers that died."""
    for job in jobs:
        if job.owner and job.started_at is not None:
            log.add(run_record(job, ErrorCode.INTERRUPTED))
