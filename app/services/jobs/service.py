"""Jobs: traces that run independently of a connection and may outlive their client, their server, or both.

An accepted job is on disk. From then on it runs once, as soon as a slot is free; after a crash the server
finds it again at its next start.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Final

from api_schemas.errors import ApiError, ErrorCode, printable
from api_schemas.jobs import Job, JobError, JobEvent, JobList, JobStatus, JobSummary
from app.audit import AuditLog
from app.engine.served_model import ServedModel
from app.http.errors import error_bytes
from app.http.lifecycle import Lifecycle
from app.limits.tenant_budget import TenantBudget
from app.services.jobs.dispatch import JobCallers, JobCleanup, JobDispatcher
from app.services.jobs.feed import JobFeed
from app.services.jobs.local_calls import LocalCalls
from app.services.jobs.runs import JobTools, record_interrupted
from app.services.traces import TraceService, check_still_allowed
from app.settings import Settings
from app.storage.database import Database, job_folder
from app.storage.jobs.files import JOB_BYTES, JobFiles
from app.storage.jobs.leases import JobLeases
from app.storage.jobs.store import Accepted, JobStore, NewJob, RemovedJobs
from app.storage.open_files import OpenResult
from app.storage.quotas import DiskQuota, Holder, StoredBytes
from app.storage.tables import JobRow
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceHead
from nnsight_engine.serialization import DecodeError

_MAX_NAME_CHARS: Final = 500


def summary_of(head: TraceHead) -> JobSummary:
    return JobSummary(
        model=_short(head.model),
        dialect=head.dialect,
        kind=head.kind,
        num_blocks=len(head.groups),
        python=_short(head.python),
        client=_short(head.client),
    )


def _short(text: str) -> str:
    return printable(text).replace("\0", "")[:_MAX_NAME_CHARS]


def job_of(row: JobRow) -> Job:
    error = None
    if row.code is not None:
        error = JobError(message=row.message or "", code=row.code)
    return Job(
        id=row.id,
        status=JobStatus(row.status),
        model=row.model,
        engine=row.engine,
        request=JobSummary.model_validate(row.head),
        error=error,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        expires_at=row.expires_at,
        idempotency_key=row.idempotency_key,
        request_bytes=row.request_bytes,
        result_bytes=row.result_bytes,
        attempt=row.attempt,
        num_events=row.num_events,
        reruns=row.reruns,
        cancel_requested=row.cancel_requested,
    )


def error_frame(row: JobRow) -> bytes:
    """Return the only frame of a job that has no result: the error that ended it."""
    try:
        code = ErrorCode(row.code or "")
    except ValueError:
        code = ErrorCode.INTERNAL
    frame = Frame(FrameKind.ERROR, error_bytes(ApiError(code, row.message or "")))
    return frame.head() + bytes(frame.data)


_ID_BYTES: Final = 24


@dataclasses.dataclass(frozen=True, slots=True)
class SubmittedJob:
    job: Job
    is_new: bool


@dataclasses.dataclass(frozen=True, slots=True)
class JobResult:
    """A file, which the caller closes, or an error frame; ``tag``, an ETag, changes with each run."""

    tag: str
    file: OpenResult | None = None
    frame: bytes = b""


class JobService:
    def __init__(
        self,
        settings: Settings,
        database: Database,
        traces: TraceService,
        lifecycle: Lifecycle,
        served: Callable[[], ServedModel],
        callers: JobCallers,
        stored: StoredBytes,
        log: AuditLog,
    ) -> None:
        self._settings = settings
        self._traces = traces
        self._lifecycle = lifecycle
        self._database = database
        self._callers = callers
        self._budget = TenantBudget.of(settings)
        space = DiskQuota(self._budget.job_bytes, stored)
        self._files = JobFiles(job_folder(settings), space)
        self._store = JobStore(self._database, waiting=self._budget.waiting_jobs, ttl_s=settings.job_ttl_s)
        self._cleanup = JobCleanup(self._database, self._files, ttl_s=settings.job_ttl_s)
        self._feed = JobFeed(self._store)
        self._served = served
        self._log = log
        self.local_calls = LocalCalls(settings.local_block_timeout_s)
        self._dispatcher: JobDispatcher | None = None

    @property
    def num_followers(self) -> int:
        return self._feed.num_followers

    @property
    def num_running(self) -> int:
        return len(self._dispatcher.running) if self._dispatcher is not None else 0

    def num_running_of(self, owner: str) -> int:
        return self._dispatcher.num_running(owner) if self._dispatcher is not None else 0

    @property
    def used_bytes(self) -> int:
        return self._files.space.used_bytes

    async def levels(self) -> tuple[dict[str, int], float]:
        """Return the number of this model's jobs by status, and the longest wait in seconds."""
        counts, since = await self._store.levels(self._served().names[0])
        return counts, 0.0 if since is None else max(0.0, time.time() - since)

    def _check(self, head: TraceHead) -> None:
        check_still_allowed(self._settings, head)
        self._served().check(head)

    async def num_waiting(self, owner: str | None = None) -> int:
        return await self._store.num_waiting(self._served().names[0], owner)

    async def start(self) -> None:
        """Recover the jobs and files of dead servers, and begin to run jobs."""
        try:
            own = await self._files.start()
            leases = JobLeases(self._database, holder=own.path.name, ttl_s=self._settings.job_ttl_s)
            lost = await leases.recover(dead=own.dead)
            record_interrupted(lost, self._log)
            await self._files.remove_results([(job.id, job.attempt) for job in lost])
            await self._cleanup.start()
        except BaseException:
            await self.stop()
            raise
        tools = JobTools(
            traces=self._traces,
            files=self._files,
            leases=leases,
            check=self._check,
            notify_followers=self._feed.notify,
            calls=self.local_calls,
            log=self._log,
        )
        self._dispatcher = JobDispatcher(
            tools,
            cleanup=self._cleanup,
            lifecycle=self._lifecycle,
            model=lambda: self._served().names[0],
            allowance=self._budget.running_jobs,
            callers=self._callers,
        )
        self._dispatcher.start()

    async def stop(self) -> None:
        """Put running jobs back into the queue, and close; idempotent."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            await dispatcher.stop()
        await self._cleanup.stop()
        await self._feed.close()
        await self._files.close()

    async def submit(
        self,
        chunks: AsyncIterator[bytes],
        *,
        check: Callable[[TraceHead], None],
        key: str | None,
        holder: Holder,
        reruns: bool,
        traceparent: str = "",
    ) -> SubmittedJob:
        """Accept a trace, or return the job that was created before with the same idempotency key.

        ``check`` raises ApiError for a refused head. ``reruns``: the job runs again if the server
        dies while it runs. ``traceparent`` is the span that the job's spans link to, or empty.

        Raises:
            ApiError: ``invalid_trace``, ``queue_full``, ``job_store_full``, ``stored_bytes_full``,
                ``idempotency_conflict``, or no engine here runs it.
        """
        model = self._served().names[0]
        if key is None:
            # With a key it may repeat a queued job, which only the digest of its bytes can tell.
            await self._store.check_room(model, holder.tenant)
        async with self._files.received(chunks, holder) as upload:
            try:
                head = (await self._files.head_of(upload)).head
            except DecodeError as error:
                raise ApiError(ErrorCode.INVALID_TRACE, str(error)) from error
            check(head)
            self._traces.engine_for(head)
            new = NewJob(
                id=secrets.token_urlsafe(_ID_BYTES),
                owner=holder.tenant,
                model=model,
                summary=summary_of(head),
                digest=upload.digest,
                request_bytes=upload.num_bytes,
                idempotency_key=key,
                reruns=reruns,
                key_id=holder.key_id,
                traceparent=traceparent,
            )
            await self._files.adopt(upload, new.id)
        # Shielded from cancellation: the job may already be in the database, or else its files must be
        # removed.
        accepted = await asyncio.shield(asyncio.ensure_future(self._accept(new)))
        return SubmittedJob(job_of(accepted.job), accepted.is_new)

    async def _accept(self, new: NewJob) -> Accepted:
        """Insert a job whose request is in its folder into the database, or remove the folder."""
        never_was = RemovedJobs([new.id], [(new.holder, JOB_BYTES + new.request_bytes)])
        try:
            accepted = await self._store.accept(new)
        except Exception:
            await self._cleanup.remove_files(never_was)
            raise
        if not accepted.is_new:
            await self._cleanup.remove_files(never_was)
        self._wake()
        return accepted

    async def get(self, job_id: str, owner: str) -> Job:
        """Raise ApiError ``job_not_found``."""
        return job_of(await self._store.get(job_id, owner))

    async def page(self, owner: str, *, status: JobStatus | None, after: str | None, limit: int) -> JobList:
        """Return a page, the newest first; raises ApiError ``job_not_found`` if no job is ``after``."""
        rows, has_more = await self._store.page(owner, status=status, after=after, limit=limit)
        return JobList.of([job_of(row) for row in rows], has_more=has_more)

    async def cancel(self, job_id: str, owner: str) -> Job:
        """Cancel a job on whichever server it runs; raises ApiError ``job_not_found``.

        A finished job stays as it is; a running one may take a moment to end.
        """
        job = await self._store.cancel(job_id, owner)
        self._report_cancelled(job_id)
        return job_of(job)

    async def remove(self, job_id: str, owner: str) -> None:
        """Cancel a job and delete it with its files; raises ApiError ``job_not_found``."""
        gone = await self._store.remove(job_id, owner)
        self._report_cancelled(job_id)
        await self._cleanup.remove_files(gone)

    async def rerun(self, job_id: str, holder: Holder, traceparent: str = "") -> Job:
        """Queue a job again, owned by the key of this request; raises ApiError ``job_not_rerunnable``."""
        job, (before, num_bytes) = await self._store.rerun(job_id, holder, traceparent)
        self._files.space.free(num_bytes, before)
        await self._files.remove_results([(job_id, job.attempt)])
        self._feed.notify(job_id)
        self._wake()
        return job_of(job)

    async def result(self, job_id: str, owner: str) -> JobResult:
        """Return the final frames of a job.

        Raises:
            ApiError: ``job_not_found``, ``job_not_finished``, ``result_not_found`` (its file was deleted),
                ``rate_limit_exceeded`` (too many results are open).
        """
        row = await self._store.get(job_id, owner)
        if not JobStatus(row.status).is_final:
            raise ApiError(
                ErrorCode.JOB_NOT_FINISHED,
                f"The job is {row.status} and has no result yet; GET /v1/jobs/{job_id}/events follows it.",
            )
        tag = f'"{job_id}.{row.attempt}.{row.num_events}"'
        if row.result_bytes is None:
            return JobResult(tag, frame=error_frame(row))
        try:
            opened = await self._files.result(job_id, row.attempt, row.result_bytes, row.holder)
        except FileNotFoundError as error:
            raise ApiError(
                ErrorCode.RESULT_NOT_FOUND,
                "The job's result was removed from the server's disk; run it again.",
            ) from error
        return JobResult(tag, opened)

    async def follow(self, job_id: str, owner: str, after: int) -> AsyncGenerator[JobEvent, None]:
        """Return a job's events after number ``after``, as they happen."""
        await self._store.get(job_id, owner)
        return self._feed.follow(job_id, owner, after)

    def _wake(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.wake()

    def _report_cancelled(self, job_id: str) -> None:
        self._feed.notify(job_id)
        if self._dispatcher is not None:
            self._dispatcher.cancel(job_id)
