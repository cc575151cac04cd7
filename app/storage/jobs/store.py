"""Jobs from the perspective of clients; accepted once per idempotency key, and stored before the response."""

from __future__ import annotations

import dataclasses
from typing import Final

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobEvent, JobStatus, JobSummary
from app.limits.allowances import Allowance
from app.storage.database import Database
from app.storage.jobs.files import JOB_BYTES
from app.storage.jobs.states import FINAL, add_events, cancelled, change, now, row_of
from app.storage.quotas import Holder
from app.storage.tables import EventRow, JobRow

_MAX_EXPIRED: Final = 200


@dataclasses.dataclass(frozen=True, slots=True)
class RemovedJobs:
    """The ids of removed jobs, and for each its holder and its size in bytes."""

    ids: list[str]
    freed: list[tuple[Holder, int]]


class JobRemoval:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def remove_ended(self, job_id: str) -> RemovedJobs:
        """Remove a job whose removal was requested while it ran, after its end."""

        def write(session: Session) -> RemovedJobs:
            wanted = select(JobRow).where(JobRow.id == job_id, JobRow.removed)
            return removed(session, list(session.scalars(wanted)))

        return await self._database.write(write)

    async def remove_expired(self, now_s: float) -> RemovedJobs:
        """Remove a bounded number of jobs that have expired, or whose removal is pending."""

        def write(session: Session) -> RemovedJobs:
            over = (JobRow.expires_at <= now_s) | JobRow.removed
            wanted = select(JobRow).where(over, JobRow.status.in_(FINAL)).limit(_MAX_EXPIRED)
            return removed(session, list(session.scalars(wanted)))

        return await self._database.write(write)

    async def known(self) -> set[str]:
        return set(await self._database.read(lambda session: session.scalars(select(JobRow.id)).all()))

    async def used_bytes(self) -> dict[Holder, int]:
        of_files = JobRow.request_bytes + func.coalesce(JobRow.result_bytes, 0)
        total = func.sum(of_files + JobRow.event_bytes + JOB_BYTES)
        wanted = select(JobRow.owner, JobRow.key_id, total).group_by(JobRow.owner, JobRow.key_id)
        rows = await self._database.read(lambda session: session.execute(wanted).all())
        return {Holder(row[0], row[1]): int(row[2] or 0) for row in rows}


def removed(session: Session, jobs: list[JobRow]) -> RemovedJobs:
    """Delete those of the jobs that have ended, and return them."""
    # The status is checked again: on a database with concurrent writers a job may have been requeued.
    gone = session.execute(
        delete(JobRow)
        .where(JobRow.number.in_([job.number for job in jobs]), JobRow.status.in_(FINAL))
        .returning(
            JobRow.id,
            JobRow.owner,
            JobRow.key_id,
            JobRow.request_bytes,
            JobRow.result_bytes,
            JobRow.event_bytes,
        )
        .execution_options(synchronize_session=False)
    ).all()
    freed = [
        (
            Holder(job.owner, job.key_id),
            job.request_bytes + (job.result_bytes or 0) + job.event_bytes + JOB_BYTES,
        )
        for job in gone
    ]
    return RemovedJobs([job.id for job in gone], freed)


_MAX_PAGE_CHARS: Final = 256 * 1024
"""The size of a page of events, which each follower holds in memory while its client reads."""
_FETCHED: Final = 20
_RERUNNABLE: Final = [JobStatus.ERROR.value, JobStatus.CANCELLED.value]


@dataclasses.dataclass(frozen=True, slots=True)
class NewJob:
    id: str
    owner: str
    model: str
    summary: JobSummary
    digest: str
    request_bytes: int
    idempotency_key: str | None
    reruns: bool
    key_id: str = ""
    traceparent: str = ""

    @property
    def holder(self) -> Holder:
        return Holder(self.owner, self.key_id)


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """A job accepted now or, if ``is_new`` is false, when its idempotency key was first sent."""

    job: JobRow
    is_new: bool


@dataclasses.dataclass(frozen=True, slots=True)
class EventPage:
    """A page of a job's events; ``is_last`` says that the job has ended and no event follows."""

    events: list[JobEvent]
    num_events: int
    is_last: bool


class JobStore:
    """Nonexistent ids and those of other owners are indistinguishable; ``waiting`` limits jobs per model."""

    def __init__(self, database: Database, *, waiting: Allowance, ttl_s: float) -> None:
        self._database = database
        self._waiting = waiting
        self._ttl_s = ttl_s

    async def accept(self, new: NewJob) -> Accepted:
        """Insert a job as ``QUEUED``, or return the job that was sent with its idempotency key before.

        The errors are ``queue_full`` and ``idempotency_conflict``: the key was used for another request.
        """
        try:
            return await self._database.write(lambda session: self._accept(session, new))
        except IntegrityError:
            # Another server has just inserted the same key, on a database with concurrent writers.
            return await self._database.write(lambda session: self._accept(session, new))

    async def check_room(self, model: str, owner: str) -> None:
        """Raise ``queue_full`` if a job would not be accepted, before its request is read."""
        await self._database.read(lambda session: self._check_room(session, model, owner))

    async def get(self, job_id: str, owner: str) -> JobRow:
        row = await self._database.read(lambda session: row_of(session, job_id, owner))
        if row is None:
            raise not_found(job_id)
        return row

    async def page(
        self, owner: str, *, status: JobStatus | None, after: str | None, limit: int
    ) -> tuple[list[JobRow], bool]:
        """Return jobs, newest first, and whether there are more."""

        def read(session: Session) -> list[JobRow]:
            wanted: list[ColumnElement[bool]] = [JobRow.owner == owner, JobRow.removed.is_(False)]
            if status is not None:
                wanted.append(JobRow.status == status.value)
            if after is not None:
                last = row_of(session, after, owner)
                if last is None:
                    raise not_found(after, "after")
                wanted.append(JobRow.number < last.number)
            newest_first = select(JobRow).where(*wanted).order_by(JobRow.number.desc())
            return list(session.scalars(newest_first.limit(limit + 1)))

        rows = await self._database.read(read)
        return rows[:limit], len(rows) > limit

    async def events(self, job_id: str, owner: str, *, after: int, limit: int) -> EventPage:
        """Return at most ``limit`` events after event number ``after``, fewer if they are large."""

        def read(session: Session) -> EventPage:
            # The job is read before its events, so that all events it counts can be read.
            job = row_of(session, job_id, owner)
            if job is None:
                raise not_found(job_id)
            rows = session.scalars(
                select(EventRow)
                .where(EventRow.job_number == job.number, EventRow.seq > after)
                .order_by(EventRow.seq)
                .limit(limit)
                .execution_options(yield_per=_FETCHED)
            )
            events, num_chars = [], 0
            for row in rows:
                events.append(_event_from_row(row, job_id))
                num_chars += len(row.message or "")
                if num_chars > _MAX_PAGE_CHARS:
                    break
            last = events[-1].id if events else after
            is_last = JobStatus(job.status).is_final and last >= job.num_events
            return EventPage(events, job.num_events, is_last)

        return await self._database.read(read)

    async def num_events(self, ids: list[str]) -> dict[str, int]:
        wanted = select(JobRow.id, JobRow.num_events).where(JobRow.id.in_(ids), JobRow.removed.is_(False))
        rows = await self._database.read(lambda session: session.execute(wanted).all())
        return {row.id: row.num_events for row in rows}

    async def cancel(self, job_id: str, owner: str) -> JobRow:
        """Cancel a waiting job, or request the cancellation of a running one; no effect after its end."""

        def write(session: Session) -> JobRow:
            job = _existing(session, job_id, owner)
            self._cancel(session, job)
            return _fresh(session, job)

        return await self._database.write(write)

    async def remove(self, job_id: str, owner: str) -> RemovedJobs:
        """Cancel and remove a job; a running one is hidden at once, and is removed after its end."""

        def write(session: Session) -> RemovedJobs:
            job = _existing(session, job_id, owner)
            self._cancel(session, job)
            # Its idempotency key may be used again.
            change(session, job.number, events=[], removed=True, idempotency_key=None)
            return removed(session, [_fresh(session, job)])

        return await self._database.write(write)

    async def rerun(
        self, job_id: str, holder: Holder, traceparent: str = ""
    ) -> tuple[JobRow, tuple[Holder, int]]:
        """Requeue a failed or cancelled job; also return the holder and the size of its dropped result."""

        def write(session: Session) -> tuple[JobRow, tuple[Holder, int]]:
            job = _existing(session, job_id, holder.tenant)
            key_id = job.key_id
            if job.status not in _RERUNNABLE:
                raise _not_rerunnable(job)
            self._check_room(session, job.model, holder.tenant)
            queued = now(JobStatus.QUEUED)
            nothing = dict.fromkeys(
                ["engine", "message", "code", "started_at", "finished_at", "expires_at", "result_bytes"]
            )
            is_ours = change(
                session,
                job.number,
                JobRow.status.in_(_RERUNNABLE),
                events=[queued],
                queued_at=queued.time,
                cancel_requested=False,
                num_interruptions=0,
                key_id=holder.key_id,
                traceparent=traceparent,
                **nothing,
            )
            if not is_ours:  # a concurrent request was first, on a database with concurrent writers
                raise _not_rerunnable(_fresh(session, job))
            freed = (Holder(job.owner, key_id), job.result_bytes or 0)
            return _fresh(session, job), freed

        return await self._database.write(write)

    async def num_waiting(self, model: str, owner: str | None = None) -> int:
        return await self._database.read(lambda session: _num_waiting(session, model, owner))

    async def levels(self, model: str) -> tuple[dict[str, int], float | None]:
        """Return the numbers of a model's jobs by status, and when the oldest waiting one was queued."""

        def read(session: Session) -> tuple[dict[str, int], float | None]:
            wanted = (JobRow.model == model, JobRow.removed.is_(False))
            counts = session.execute(
                select(JobRow.status, func.count()).where(*wanted).group_by(JobRow.status)
            )
            oldest = select(func.min(JobRow.queued_at)).where(
                *wanted, JobRow.status == JobStatus.QUEUED.value, JobRow.lease_by.is_(None)
            )
            return {row[0]: row[1] for row in counts}, session.scalar(oldest)

        return await self._database.read(read)

    def _accept(self, session: Session, new: NewJob) -> Accepted:
        if new.idempotency_key is not None:
            before = session.scalar(
                select(JobRow).where(JobRow.owner == new.owner, JobRow.idempotency_key == new.idempotency_key)
            )
            if before is not None:
                return _same(before, new)
        self._check_room(session, new.model, new.owner)
        events = [now(JobStatus.RECEIVED), now(JobStatus.QUEUED)]
        job = JobRow(
            id=new.id,
            owner=new.owner,
            model=new.model,
            status=JobStatus.QUEUED.value,
            head=new.summary.model_dump(),
            created_at=events[0].time,
            queued_at=events[1].time,
            idempotency_key=new.idempotency_key,
            digest=new.digest,
            request_bytes=new.request_bytes,
            num_events=len(events),
            reruns=new.reruns,
            key_id=new.key_id,
            traceparent=new.traceparent,
        )
        session.add(job)
        session.flush()
        add_events(session, job.number, 0, events)
        return Accepted(job, is_new=True)

    def _check_room(self, session: Session, model: str, owner: str) -> None:
        if owner:
            self._waiting.check(owner, _num_waiting(session, model, owner))
        self._waiting.check_total(_num_waiting(session, model))

    def _cancel(self, session: Session, job: JobRow) -> None:
        # The request is recorded first: on a database with concurrent writers that locks the row, so that the
        # job is not requeued in between, without being cancelled.
        if change(session, job.number, JobRow.status.not_in(FINAL), events=[], cancel_requested=True):
            event, values = cancelled(self._ttl_s)
            change(session, job.number, JobRow.lease_by.is_(None), events=[event], **values)


def not_found(job_id: str, param: str | None = None) -> ApiError:
    return ApiError(
        ErrorCode.JOB_NOT_FOUND,
        f"No job has the id {job_id[:100]!r}; jobs go some time after their end, see 'expires_at'.",
        param,
    )


def _not_rerunnable(job: JobRow) -> ApiError:
    return ApiError(
        ErrorCode.JOB_NOT_RERUNNABLE,
        f"Only jobs that failed or were cancelled run again, and this one is {job.status}; "
        "send the trace as a new job.",
    )


def _event_from_row(row: EventRow, job_id: str) -> JobEvent:
    return JobEvent(
        id=row.seq,
        job=job_id,
        status=JobStatus(row.status),
        time=row.time,
        message=row.message,
        engine=row.engine,
    )


def _num_waiting(session: Session, model: str, owner: str | None = None) -> int:
    waiting = select(func.count()).where(
        JobRow.status == JobStatus.QUEUED.value, JobRow.model == model, JobRow.lease_by.is_(None)
    )
    if owner is not None:
        waiting = waiting.where(JobRow.owner == owner)
    return session.scalar(waiting) or 0


def _existing(session: Session, job_id: str, owner: str) -> JobRow:
    job = row_of(session, job_id, owner)
    if job is None:
        raise not_found(job_id)
    return job


def _fresh(session: Session, job: JobRow) -> JobRow:
    session.refresh(job)
    return job


def _same(before: JobRow, new: NewJob) -> Accepted:
    if before.digest == new.digest:
        return Accepted(before, is_new=False)
    raise ApiError(
        ErrorCode.IDEMPOTENCY_CONFLICT,
        f"The key {new.idempotency_key!r} was sent with another trace before; a key names one request.",
        "Idempotency-Key",
    )
