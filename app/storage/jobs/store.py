"""The table of jobs: accepted once per idempotency key, run by the one server that holds a job's lease.

Every write of a run names its claim in the same statement: a server that was declared dead changes nothing.

A lease has expired when an observer has not seen it renewed for ``LEASE_S`` seconds of its own monotonic
clock. The clocks of machines differ and jump, and must neither end a job nor keep one from running.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, and_, delete, func, not_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobEvent, JobStatus, JobSummary
from app.limits.limit import Holder, Limit
from app.storage.database import Database
from app.storage.jobs.states import CANCELLED, FINAL, JobEnd, add_events, change, finish, now
from app.storage.tables import JOB_BYTES, EventRow, JobRow

JobKind = tuple[str, str]
"""The dialect and the kind of a job's request; jobs that share both run on one engine, in one queue."""

LEASE_S: Final = 30.0
"""The time in seconds after which a lease that was not renewed has expired."""

MAX_INTERRUPTIONS: Final = 3
"""A job interrupted this often by a server's death is not restarted automatically, because it may be the
cause.
"""

_MAX_EXPIRED: Final = 200
_MAX_PAGE_CHARS: Final = 256 * 1024
"""The size of a page of events, which each follower holds in memory while its client reads."""
_FETCHED: Final = 20
_RERUNNABLE: Final = [JobStatus.ERROR.value, JobStatus.CANCELLED.value]
_STOPPED: Final = "The server or its engine stopped; the job runs again when one serves its model."
_DIED: Final = "The server died; the job runs again."
_INTERRUPTED: Final = JobEnd(
    JobStatus.ERROR,
    "The server died while the job ran, and what its blocks had computed is lost. POST …/rerun runs it "
    "again; a job submitted with ?rerun=true does so by itself, though not for ever.",
    ErrorCode.INTERRUPTED,
)
_WAITS: Final = (JobRow.status == JobStatus.QUEUED.value, JobRow.lease_by.is_(None))
_FREE: Final[dict[str, Any]] = {"lease_by": None, "lease_until": None, "started_at": None}

Lease = tuple[str | None, float | None]
T = TypeVar("T")


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

    @property
    def num_bytes(self) -> int:
        return self.request_bytes + JOB_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class EventPage:
    """A page of a job's events; ``is_last`` says that the job has ended and no event follows."""

    events: list[JobEvent]
    num_events: int
    is_last: bool


class LeaseLostError(Exception):
    pass


class JobStore:
    """Nonexistent ids and those of other owners are indistinguishable; ``waiting`` limits jobs per model.

    ``server`` is the unique name of this process, which claims jobs. Writes of a run raise LeaseLostError
    once its lease is lost. ``on_change`` is called with a job's id after its state or events have changed.
    """

    def __init__(
        self,
        database: Database,
        server: str,
        *,
        waiting: Limit,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_change: Callable[[str], None] = lambda _: None
        self._database = database
        self._server = server
        self._waiting = waiting
        self._ttl_s = ttl_s
        self._clock = clock
        self._observed: dict[int, tuple[Lease, float]] = {}

    async def accept(self, new: NewJob) -> tuple[JobRow, bool]:
        """Insert a job as ``QUEUED``, and return it and True; or the one with its idempotency key, and False.

        The errors are ``queue_full`` and ``idempotency_conflict``: the key was used for another request.
        """
        try:
            return await self._database.write(lambda session: self._insert_or_existing(session, new))
        except IntegrityError:
            # Another server has just inserted the same key, on a database with concurrent writers.
            return await self._database.write(lambda session: self._insert_or_existing(session, new))

    async def check_room(self, model: str, owner: str) -> None:
        """Raise ``queue_full`` if a job would not be accepted, before its request is read."""
        await self._database.read(lambda session: self._check_room(session, model, owner))

    async def get(self, job_id: str, owner: str) -> JobRow:
        return await self._database.read(lambda session: _visible_job(session, job_id, owner))

    async def page(
        self, owner: str, *, status: JobStatus | None, after: str | None, limit: int
    ) -> tuple[list[JobRow], bool]:
        """Return jobs, newest first, and whether there are more."""

        def read(session: Session) -> list[JobRow]:
            conditions: list[ColumnElement[bool]] = [JobRow.owner == owner, JobRow.removed.is_(False)]
            if status is not None:
                conditions.append(JobRow.status == status.value)
            if after is not None:
                conditions.append(JobRow.number < _visible_job(session, after, owner, "after").number)
            newest_first = select(JobRow).where(*conditions).order_by(JobRow.number.desc())
            return list(session.scalars(newest_first.limit(limit + 1)))

        rows = await self._database.read(read)
        return rows[:limit], len(rows) > limit

    async def events(self, job_id: str, owner: str, *, after: int, limit: int) -> EventPage:
        """Return at most ``limit`` events after event number ``after``, fewer if they are large."""

        def read(session: Session) -> EventPage:
            # The job is read before its events, so that all events it counts can be read.
            job = _visible_job(session, job_id, owner)
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
            last_id = events[-1].id if events else after
            is_last = JobStatus(job.status).is_final and last_id >= job.num_events
            return EventPage(events, job.num_events, is_last)

        return await self._database.read(read)

    async def num_events(self, ids: list[str]) -> dict[str, int]:
        query = select(JobRow.id, JobRow.num_events).where(JobRow.id.in_(ids), JobRow.removed.is_(False))
        rows = await self._database.read(lambda session: session.execute(query).all())
        return {row.id: row.num_events for row in rows}

    async def cancel(self, job_id: str, owner: str) -> JobRow:
        """Cancel a waiting job, or request the cancellation of a running one; no effect after its end."""

        def write(session: Session) -> JobRow:
            job = _visible_job(session, job_id, owner)
            self._cancel(session, job)
            session.refresh(job)
            return job

        return await self._write(job_id, write)

    async def remove(self, job_id: str, owner: str) -> list[JobRow]:
        """Cancel a job and return it if it is removed now; a running one is hidden until it ends."""

        def write(session: Session) -> list[JobRow]:
            job = _visible_job(session, job_id, owner)
            self._cancel(session, job)
            # Its idempotency key may be used again.
            change(session, job.number, events=[], removed=True, idempotency_key=None)
            return _delete_ended(session, JobRow.number == job.number)

        return await self._write(job_id, write)

    async def remove_expired(self, now_s: float, job_id: str = "") -> list[JobRow]:
        """Remove a bounded number of jobs that have expired, or one if it has, and return them."""
        condition = JobRow.expires_at <= now_s
        if job_id:
            condition &= JobRow.id == job_id
        return await self._database.write(lambda session: _delete_ended(session, condition))

    async def rerun(self, job_id: str, holder: Holder, traceparent: str = "") -> tuple[JobRow, Holder, int]:
        """Requeue a failed or cancelled job; also return the holder and the size of its dropped result."""

        def write(session: Session) -> tuple[JobRow, Holder, int]:
            job = _visible_job(session, job_id, holder.tenant)
            previous_holder, num_bytes = job.holder, job.result_bytes or 0
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
            session.refresh(job)
            if not is_ours:  # a concurrent request was first, on a database with concurrent writers
                raise _not_rerunnable(job)
            return job, previous_holder, num_bytes

        return await self._write(job_id, write)

    async def all_ids(self) -> set[str]:
        return set(await self._database.read(lambda session: session.scalars(select(JobRow.id)).all()))

    async def used_bytes(self) -> dict[Holder, int]:
        of_files = JobRow.request_bytes + func.coalesce(JobRow.result_bytes, 0)
        total = func.sum(of_files + JobRow.event_bytes + JOB_BYTES)
        query = select(JobRow.owner, JobRow.key_id, total).group_by(JobRow.owner, JobRow.key_id)
        rows = await self._database.read(lambda session: session.execute(query).all())
        return {Holder(owner, key_id): int(num_bytes or 0) for owner, key_id, num_bytes in rows}

    async def num_waiting(self, model: str, owner: str | None = None) -> int:
        return await self._database.read(lambda session: _num_waiting(session, model, owner))

    async def levels(self, model: str) -> tuple[dict[str, int], float | None]:
        """Return the numbers of a model's jobs by status, and when the oldest waiting one was queued."""

        def read(session: Session) -> tuple[dict[str, int], float | None]:
            conditions = (JobRow.model == model, JobRow.removed.is_(False))
            counts = session.execute(
                select(JobRow.status, func.count()).where(*conditions).group_by(JobRow.status)
            )
            oldest = select(func.min(JobRow.queued_at)).where(*conditions, *_WAITS)
            return {row[0]: row[1] for row in counts}, session.scalar(oldest)

        return await self._database.read(read)

    async def claim(
        self,
        model: str,
        served_at: Mapping[str, float],
        *,
        without_kinds: Collection[JobKind] = (),
        without_keys: Collection[str] = (),
        without_owners: Collection[str] = (),
    ) -> JobRow | None:
        """Claim the next job of a model, or return None if none is waiting.

        The owner with the fewest running jobs is next, then the one served longest ago (``served_at``).
        """

        def write(session: Session) -> JobRow | None:
            waits = (
                *_WAITS,
                JobRow.model == model,
                *(not_(_is_of(kind)) for kind in without_kinds),
                JobRow.key_id.not_in(without_keys),
                JobRow.owner.not_in(without_owners),
            )
            oldest = _by_owner(session, func.min(JobRow.queued_at), *waits)
            if not oldest:
                return None
            running = _by_owner(session, func.count(), JobRow.lease_by.is_not(None), JobRow.model == model)
            owner = min(
                oldest, key=lambda name: (running.get(name, 0), served_at.get(name, 0.0), oldest[name])
            )
            # Where the database allows concurrent writers, another server may claim at the same time: each
            # skips the row that the other has locked.
            job = session.scalar(
                select(JobRow)
                .where(*waits, JobRow.owner == owner)
                .order_by(JobRow.queued_at, JobRow.number)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            lease = {"lease_by": self._server, "lease_until": time.time() + LEASE_S}
            if job is None or not change(
                session, job.number, *waits, events=[], attempt=JobRow.attempt + 1, **lease
            ):
                return None
            session.refresh(job)
            return job

        return await self._database.write(write)

    async def append_events(self, job: JobRow, events: Sequence[JobEvent]) -> None:
        """Add events to a run's job, with the engine and the start that they tell."""
        values: dict[str, object] = {}
        for event in events:
            if event.engine is not None:
                values["engine"] = event.engine
            if event.status is JobStatus.RUNNING and job.started_at is None:
                values["started_at"] = job.started_at = event.time

        def write(session: Session) -> None:
            if not change(session, job.number, *_claimed_as(job), events=events, **values):
                raise LeaseLostError(job.id)

        await self._write(job.id, write)

    async def end(self, job: JobRow, end: JobEnd) -> JobEvent:
        """End a run's job, and return its last event."""

        def write(session: Session) -> JobEvent:
            event = self._finish(session, job, *_claimed_as(job), end=end)
            if event is None:
                raise LeaseLostError(job.id)
            return event

        return await self._write(job.id, write)

    async def requeue(self, job: JobRow, *, has_begun: bool, was_interrupted: bool = False) -> None:
        """Give a job back, or cancel it if that was requested meanwhile.

        For one that has not begun, the attempt does not count. ``was_interrupted`` counts an interruption,
        because the job may be its cause.
        """
        events = [now(JobStatus.QUEUED, _STOPPED)] if has_begun else []
        counts = {
            "attempt": JobRow.attempt - int(not has_begun),
            "num_interruptions": JobRow.num_interruptions + int(was_interrupted),
        }

        def write(session: Session) -> None:
            if not self._requeue(session, job, *_claimed_as(job), events=events, **counts):
                raise LeaseLostError(job.id)

        await self._write(job.id, write)

    async def renew(self, ids: Collection[str]) -> None:
        """Extend the leases of jobs, as far as this process still has them."""
        renewed = (
            update(JobRow)
            .where(JobRow.id.in_(ids), JobRow.lease_by == self._server)
            .values(lease_until=time.time() + LEASE_S)
        )
        await self._database.write(lambda session: session.execute(renewed))

    async def held_jobs(self, ids: Collection[str]) -> dict[str, bool]:
        """Return the jobs whose lease is still held, each with whether its cancellation is requested."""
        mine = select(JobRow.id, JobRow.cancel_requested).where(
            JobRow.id.in_(ids), JobRow.lease_by == self._server
        )
        rows = await self._database.read(lambda session: session.execute(mine).all())
        return {row.id: row.cancel_requested for row in rows}

    async def recover(self, *, dead: Collection[str] = (), own_ids: Collection[str] = ()) -> list[JobRow]:
        """Requeue or end the jobs of dead servers; return those whose partial results are to be removed.

        Args:
            dead: Processes known to be dead, whatever the state of their leases.
            own_ids: Jobs that this process runs; its other leases are left over from a fault.
        """
        leases = select(JobRow.number, JobRow.lease_by, JobRow.lease_until).where(
            JobRow.lease_by.is_not(None), JobRow.id.not_in(own_ids)
        )
        # Usually no lease has expired, and checking does not write.
        rows = await self._database.read(lambda session: session.execute(leases).all())
        lost = self._expired_leases({row.number: (row.lease_by, row.lease_until) for row in rows}, dead)
        if not lost:
            return []

        def write(session: Session) -> list[JobRow]:
            jobs = session.scalars(select(JobRow).where(JobRow.number.in_(lost)).with_for_update()).all()
            return [job for job in jobs if self._recover(session, job, lost[job.number])]

        jobs = await self._database.write(write)
        for job in jobs:
            self.on_change(job.id)
        return jobs

    async def _write(self, job_id: str, work: Callable[[Session], T]) -> T:
        result = await self._database.write(work)
        self.on_change(job_id)
        return result

    def _insert_or_existing(self, session: Session, new: NewJob) -> tuple[JobRow, bool]:
        """Insert a job, and True; or return its owner's job with the same idempotency key, and False."""
        if new.idempotency_key is not None:
            existing = session.scalar(
                select(JobRow).where(JobRow.owner == new.owner, JobRow.idempotency_key == new.idempotency_key)
            )
            if existing is not None:
                _check_same(existing, new)
                return existing, False
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
        return job, True

    def _check_room(self, session: Session, model: str, owner: str) -> None:
        self._waiting.check(owner, used=lambda tenant: _num_waiting(session, model, tenant or None))

    def _cancel(self, session: Session, job: JobRow) -> None:
        """End a job that waits, and request the same of one that runs."""
        # The request is recorded first: on a database with concurrent writers that locks the row, so that the
        # job is not requeued in between, without being cancelled.
        if change(session, job.number, JobRow.status.not_in(FINAL), events=[], cancel_requested=True):
            self._finish(session, job, JobRow.lease_by.is_(None), end=CANCELLED)

    def _finish(
        self, session: Session, job: JobRow, *conditions: ColumnElement[bool], end: JobEnd, **values: Any
    ) -> JobEvent | None:
        return finish(session, job.number, *conditions, end=end, ttl_s=self._ttl_s, **values)

    def _requeue(
        self,
        session: Session,
        job: JobRow,
        *conditions: ColumnElement[bool],
        events: Sequence[JobEvent],
        **values: Any,
    ) -> bool:
        """Release a lease and requeue, or cancel if that was requested; return whether the lease was held."""
        not_cancelled = JobRow.cancel_requested.is_(False)
        if change(session, job.number, *conditions, not_cancelled, events=events, **_FREE, **values):
            return True
        return self._finish(session, job, *conditions, end=CANCELLED) is not None

    def _recover(self, session: Session, job: JobRow, lease: Lease) -> bool:
        """Requeue a job with an expired lease, or end it; False if another server was faster."""
        server, until = lease
        is_unchanged = (JobRow.lease_by == server, JobRow.lease_until == until)
        if server == self._server and job.status == JobStatus.QUEUED:
            # Claimed here, where it neither runs nor ever began: what followed the claim failed.
            return self._requeue(session, job, *is_unchanged, events=[])
        num = job.num_interruptions + 1
        may_run = num < MAX_INTERRUPTIONS and (job.reruns or job.status != JobStatus.RUNNING)
        if may_run or job.cancel_requested:
            died = now(JobStatus.QUEUED, _DIED)
            return self._requeue(session, job, *is_unchanged, events=[died], num_interruptions=num)
        return self._finish(session, job, *is_unchanged, end=_INTERRUPTED, num_interruptions=num) is not None

    def _expired_leases(self, leases: Mapping[int, Lease], dead: Collection[str]) -> dict[int, Lease]:
        """Return the leases of ``dead`` servers, and those seen unchanged for longer than ``LEASE_S``."""
        moment, observed = self._clock(), self._observed
        self._observed = {
            number: observed[number]
            if number in observed and observed[number][0] == lease
            else (lease, moment)
            for number, lease in leases.items()
        }
        return {
            number: lease
            for number, (lease, since) in self._observed.items()
            if lease[0] in dead or moment - since > LEASE_S
        }


def kind_of(job: JobRow) -> JobKind:
    return job.head["dialect"], job.head["kind"]


def _is_of(kind: JobKind) -> ColumnElement[bool]:
    dialect, name = kind
    return and_(JobRow.head["dialect"].as_string() == dialect, JobRow.head["kind"].as_string() == name)


def _claimed_as(job: JobRow) -> tuple[ColumnElement[bool], ...]:
    return JobRow.lease_by == job.lease_by, JobRow.attempt == job.attempt


def _by_owner(
    session: Session, value: ColumnElement[Any], *conditions: ColumnElement[bool]
) -> dict[str, float]:
    """Return an aggregate of the jobs that meet the conditions, by their owners."""
    rows = session.execute(select(JobRow.owner, value).where(*conditions).group_by(JobRow.owner))
    return {row[0]: row[1] for row in rows}


def _num_waiting(session: Session, model: str, owner: str | None = None) -> int:
    waiting = select(func.count()).where(*_WAITS, JobRow.model == model)
    if owner is not None:
        waiting = waiting.where(JobRow.owner == owner)
    return session.scalar(waiting) or 0


def _visible_job(session: Session, job_id: str, owner: str, param: str | None = None) -> JobRow:
    job = session.scalar(
        select(JobRow).where(JobRow.id == job_id, JobRow.owner == owner, JobRow.removed.is_(False))
    )
    if job is None:
        raise ApiError(
            ErrorCode.JOB_NOT_FOUND,
            f"No job has the id {job_id[:100]!r}; jobs go some time after their end, see 'expires_at'.",
            param,
        )
    return job


def _delete_ended(session: Session, condition: ColumnElement[bool]) -> list[JobRow]:
    """Delete those of the jobs that have ended, with their events, and return them."""
    # Locked and read anew: on a database with concurrent writers a job may have been requeued.
    ended = select(JobRow).where(condition, JobRow.status.in_(FINAL)).limit(_MAX_EXPIRED)
    jobs = session.scalars(ended.with_for_update().execution_options(populate_existing=True)).all()
    session.execute(
        delete(JobRow)
        .where(JobRow.number.in_([job.number for job in jobs]))
        .execution_options(synchronize_session=False)
    )
    return list(jobs)


def _event_from_row(row: EventRow, job_id: str) -> JobEvent:
    return JobEvent(
        id=row.seq,
        job=job_id,
        status=JobStatus(row.status),
        time=row.time,
        message=row.message,
        engine=row.engine,
    )


def _not_rerunnable(job: JobRow) -> ApiError:
    return ApiError(
        ErrorCode.JOB_NOT_RERUNNABLE,
        f"Only jobs that failed or were cancelled run again, and this one is {job.status}; "
        "send the trace as a new job.",
    )


def _check_same(existing: JobRow, new: NewJob) -> None:
    if existing.digest != new.digest:
        raise ApiError(
            ErrorCode.IDEMPOTENCY_CONFLICT,
            f"The key {new.idempotency_key!r} was sent with another trace before; a key names one request.",
            "Idempotency-Key",
        )
