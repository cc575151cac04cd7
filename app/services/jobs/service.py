"""Jobs: traces that run independently of a connection and may outlive their client, their server, or both.

An accepted job is on disk. From then on it runs once, as soon as a slot is free; after a crash the server
finds it again at its next start.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Final

from api_schemas.errors import ApiError, ErrorCode, printable
from api_schemas.jobs import Job, JobEvent, JobList, JobStatus, JobSummary
from app.limits.limit import Holder
from app.services.jobs.run import JobParts
from app.services.jobs.runner import JobRunner
from app.services.traces import last_frame
from app.storage.jobs.files import ORPHAN_S
from app.storage.jobs.store import NewJob
from app.storage.open_files import OpenResult
from app.storage.tables import JobRow
from nnsight_engine.remote_backend.messages import TraceHead
from nnsight_engine.serialization import DecodeError

logger = logging.getLogger(__name__)

_MAX_NAME_CHARS: Final = 500
_MAX_SWEEP_S: Final = 60.0
_ID_BYTES: Final = 24


class JobService:
    def __init__(self, parts: JobParts) -> None:
        self.feed = parts.feed
        self.calls = parts.calls
        self.runner = JobRunner(parts)
        self._parts = parts
        self._files = parts.files
        self._store = parts.store
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def used_bytes(self) -> int:
        return self._files.space.used()

    @property
    def _model(self) -> str:
        return self._parts.served().names[0]

    async def levels(self) -> tuple[dict[str, int], float]:
        """Return the number of this model's jobs by status, and the longest wait in seconds."""
        counts, since = await self._store.levels(self._model)
        return counts, 0.0 if since is None else max(0.0, time.time() - since)

    async def num_waiting(self, owner: str | None = None) -> int:
        return await self._store.num_waiting(self._model, owner)

    async def start(self) -> None:
        """Recover the jobs and files of dead servers, and begin to run jobs."""
        try:
            await self.runner.recover(dead=await self._files.start())
            # Of servers that died between writing a job's files and inserting its row.
            await self._files.remove_orphans(await self._store.all_ids())
            await self._count_stored()
        except BaseException:
            await self.stop()
            raise
        self._sweeper = asyncio.create_task(self._sweep(), name="jobs-sweep")
        self.runner.start()

    async def stop(self) -> None:
        """Put running jobs back into the queue, and close; idempotent."""
        await self.runner.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self.feed.close()
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
    ) -> tuple[Job, bool]:
        """Accept a trace; or return the job created before with the same idempotency key, and False.

        ``check`` raises ApiError for a refused head. ``reruns``: the job runs again if the server
        dies while it runs. ``traceparent`` is the span that the job's spans link to, or empty.

        Raises:
            ApiError: ``invalid_trace``, ``queue_full``, ``job_store_full``, ``stored_bytes_full``,
                ``idempotency_conflict``, or no engine here runs it.
        """
        model = self._model
        if key is None:
            # With a key it may repeat a queued job, which only the digest of its bytes can tell.
            await self._store.check_room(model, holder.tenant)
        async with self._files.received(chunks, holder) as upload:
            try:
                head = (await self._files.head_of(upload)).head
            except DecodeError as error:
                raise ApiError(ErrorCode.INVALID_TRACE, str(error)) from error
            check(head)
            self._parts.traces.engine_for(head)
            new = NewJob(
                id=secrets.token_urlsafe(_ID_BYTES),
                owner=holder.tenant,
                model=model,
                summary=_summary_of(head),
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
        job, is_new = await asyncio.shield(asyncio.ensure_future(self._accept(new)))
        return _job_of(job), is_new

    async def _accept(self, new: NewJob) -> tuple[JobRow, bool]:
        """Insert a job whose request is in its folder into the database, or remove the folder.

        The folder stays if this is cancelled: the row may be in the database.
        """
        try:
            job, is_new = await self._store.accept(new)
        except Exception:
            await self._files.remove([new])
            raise
        if not is_new:
            await self._files.remove([new])
        self.runner.wake()
        return job, is_new

    async def get(self, job_id: str, owner: str) -> Job:
        """Raise ApiError ``job_not_found``."""
        return _job_of(await self._store.get(job_id, owner))

    async def page(self, owner: str, *, status: JobStatus | None, after: str | None, limit: int) -> JobList:
        """Return a page, the newest first; raises ApiError ``job_not_found`` if no job is ``after``."""
        rows, has_more = await self._store.page(owner, status=status, after=after, limit=limit)
        return JobList.of([_job_of(row) for row in rows], has_more=has_more)

    async def cancel(self, job_id: str, owner: str) -> Job:
        """Cancel a job on whichever server it runs; raises ApiError ``job_not_found``.

        A finished job stays as it is; a running one may take a moment to end.
        """
        job = await self._store.cancel(job_id, owner)
        self.runner.cancel(job_id)
        return _job_of(job)

    async def remove(self, job_id: str, owner: str) -> None:
        """Cancel a job and delete it with its files; raises ApiError ``job_not_found``."""
        removed = await self._store.remove(job_id, owner)
        self.runner.cancel(job_id)
        await self._files.remove(removed)

    async def rerun(self, job_id: str, holder: Holder, traceparent: str = "") -> Job:
        """Queue a job again, owned by the key of this request; raises ApiError ``job_not_rerunnable``."""
        job, previous_holder, num_bytes = await self._store.rerun(job_id, holder, traceparent)
        self._files.space.store(-num_bytes, previous_holder)
        await self._files.remove_results([job])
        self.runner.wake()
        return _job_of(job)

    async def result(self, job_id: str, owner: str) -> tuple[str, OpenResult | bytes]:
        """Return an ETag, which changes with each run, and the final frames of a job: a file, or an error.

        The caller closes the file.

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
            return tag, last_frame(_error_of(row))
        try:
            return tag, await self._files.result(row)
        except FileNotFoundError as error:
            raise ApiError(
                ErrorCode.RESULT_NOT_FOUND,
                "The job's result was removed from the server's disk; run it again.",
            ) from error

    async def follow(self, job_id: str, owner: str, after: int) -> AsyncGenerator[JobEvent, None]:
        """Return a job's events after number ``after``, as they happen."""
        await self._store.get(job_id, owner)
        return self.feed.follow(job_id, owner, after)

    async def _count_stored(self) -> None:
        """Update the stored bytes from the database, where other servers write too."""
        self._files.space.set_stored(await self._store.used_bytes())

    async def _sweep(self) -> None:
        """Remove expired jobs, and files that belong to no job."""
        interval_s = min(_MAX_SWEEP_S, max(0.05, self._parts.settings.job_ttl_s / 4))
        orphans_removed_at = time.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            try:
                while expired := await self._store.remove_expired(time.time()):
                    await self._files.remove(expired)
                await self._count_stored()
                if time.monotonic() - orphans_removed_at > ORPHAN_S:
                    orphans_removed_at = time.monotonic()
                    await self._files.remove_orphans(await self._store.all_ids())
            except Exception:
                logger.exception("removing expired jobs failed; retrying")


def _summary_of(head: TraceHead) -> JobSummary:
    return JobSummary(
        model=_short(head.model),
        dialect=head.dialect,
        kind=head.kind,
        num_blocks=len(head.groups),
        python=_short(head.python),
        client=_short(head.client),
    )


def _short(text: str) -> str:
    """Return a client's text as the database stores it."""
    return printable(text).replace("\0", "")[:_MAX_NAME_CHARS]


def _job_of(row: JobRow) -> Job:
    return Job.model_validate(row, from_attributes=True)


def _error_of(row: JobRow) -> ApiError:
    """Return the error that a job without a result has ended with, as its row has it."""
    try:
        code = ErrorCode(row.code or "")
    except ValueError:
        code = ErrorCode.INTERNAL
    return ApiError(code, row.message or "")
