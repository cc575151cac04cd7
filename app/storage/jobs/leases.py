"""Jobs from the perspective of the servers that run them, which hold leases.

Every write checks the lease in the same statement: a server that was declared dead changes nothing.

A lease has expired when an observer has not seen it renewed for ``LEASE_S`` seconds of its own monotonic
clock. The clocks of machines differ and jump, and must neither end a job nor keep one from running.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, and_, func, not_, or_, select, update
from sqlalchemy.orm import Session

from api_schemas.errors import ErrorCode
from api_schemas.jobs import JobEvent, JobStatus
from app.storage.database import Database
from app.storage.jobs.states import FINAL, cancelled, change, ended, now
from app.storage.tables import JobRow

JobKind = tuple[str, str]
"""The dialect and the kind of a job's request; jobs that share both run on one engine, in one queue."""

LEASE_S: Final = 30.0
"""The time in seconds after which a lease that was not renewed has expired."""

MAX_INTERRUPTIONS: Final = 3
"""A job interrupted this often by a server's death is not restarted automatically, because it may be the
cause.
"""

_STOPPED: Final = "The server or its engine stopped; the job runs again when one serves its model."
_DIED: Final = "The server died; the job runs again."
_INTERRUPTED: Final = (
    "The server died while the job ran, and what its blocks had computed is lost. POST …/rerun runs it "
    "again; a job submitted with ?rerun=true does so by itself, though not for ever."
)


@dataclasses.dataclass(frozen=True, slots=True)
class JobEnd:
    status: JobStatus
    message: str | None = None
    code: ErrorCode | str | None = None
    result_bytes: int | None = None


class _Seen(NamedTuple):
    """The state of another process's lease, and when it was first observed in that state."""

    holder: str | None
    until: float | None
    since: float


class LeaseLostError(Exception):
    pass


class JobLeases:
    """The jobs that this process runs, under its unique name ``holder``.

    Writes raise LeaseLostError once the lease of a job is lost.
    """

    def __init__(
        self, database: Database, *, holder: str, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._holder = holder
        self._ttl_s = ttl_s
        self._clock = clock
        self._seen: dict[int, _Seen] = {}

    async def claim(
        self,
        model: str,
        served_at: Mapping[str, float],
        *,
        without: Collection[JobKind] = (),
        without_keys: Collection[str] = (),
        without_owners: Collection[str] = (),
    ) -> JobRow | None:
        """Claim the next job of a model, or return None if none is waiting.

        The owner with the fewest running jobs is next, then the one served longest ago (``served_at``).
        """

        def write(session: Session) -> JobRow | None:
            waits = (
                JobRow.status == JobStatus.QUEUED.value,
                JobRow.model == model,
                JobRow.lease_by.is_(None),
                JobRow.cancel_requested.is_(False),
                *(not_(_is_of(kind)) for kind in without),
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
            if job is None:
                return None
            lease = {"lease_by": self._holder, "lease_until": time.time() + LEASE_S}
            if not change(session, job.number, *waits, events=[], attempt=JobRow.attempt + 1, **lease):
                return None
            session.refresh(job)
            return job

        return await self._database.write(write)

    async def append_events(self, job: JobRow, events: Sequence[JobEvent]) -> None:
        values: dict[str, object] = {}
        for event in events:
            if event.engine is not None:
                values["engine"] = event.engine
            if event.status is JobStatus.RUNNING and job.started_at is None:
                values["started_at"] = job.started_at = event.time
        await self._change(job, events, **values)

    async def end(self, job: JobRow, end: JobEnd) -> JobEvent:
        event, values = ended(end.status, self._ttl_s, code=end.code, message=end.message)
        await self._change(job, [event], result_bytes=end.result_bytes, **values)
        return event

    async def give_back(self, job: JobRow, *, was_interrupted: bool) -> None:
        """Requeue a job, or cancel it if that was requested meanwhile; raises LeaseLostError.

        ``was_interrupted`` counts an interruption, because the job may be its cause.
        """
        values = {"started_at": None, "num_interruptions": JobRow.num_interruptions + int(was_interrupted)}
        if not await self._database.write(
            lambda session: self._free(session, job.number, [now(JobStatus.QUEUED, _STOPPED)], **values)
        ):
            raise LeaseLostError(job.id)

    async def put_back(self, job: JobRow) -> None:
        """Release a job that was claimed but not started, without counting the attempt."""
        await self._database.write(
            lambda session: self._free(session, job.number, [], attempt=JobRow.attempt - 1)
        )

    async def give_back_all(self) -> None:
        def write(session: Session) -> None:
            never_begun = select(JobRow.number).where(
                JobRow.lease_by == self._holder, JobRow.status == JobStatus.QUEUED.value
            )
            for number in session.scalars(never_begun).all():
                self._free(session, number, [])

        await self._database.write(write)

    async def renew(self, ids: Collection[str]) -> None:
        def write(session: Session) -> None:
            session.execute(
                update(JobRow)
                .where(JobRow.id.in_(ids), JobRow.lease_by == self._holder)
                .values(lease_until=time.time() + LEASE_S)
            )

        await self._database.write(write)

    async def held_jobs(self, ids: Collection[str]) -> dict[str, bool]:
        """Return the jobs whose lease is still held, each with whether its cancellation is requested."""
        mine = select(JobRow.id, JobRow.cancel_requested).where(
            JobRow.id.in_(ids), JobRow.lease_by == self._holder
        )
        rows = await self._database.read(lambda session: session.execute(mine).all())
        return {row.id: row.cancel_requested for row in rows}

    async def recover(self, *, dead: Collection[str] = (), own: Collection[str] = ()) -> list[JobRow]:
        """Requeue or end the jobs of dead servers; return those whose partial results are to be removed.

        Args:
            dead: Processes known to be dead, whatever the state of their leases.
            own: Jobs that this process runs; its other leases are left over from a fault.
        """
        held = select(JobRow.number, JobRow.lease_by, JobRow.lease_until).where(
            or_(
                JobRow.lease_by.is_not(None),
                # Requeued by an older version of the server although its cancellation was requested.
                and_(JobRow.cancel_requested, JobRow.status.not_in(FINAL)),
            ),
            JobRow.id.not_in(own),
        )
        # Usually no lease has expired, and checking does not write.
        rows = await self._database.read(lambda session: session.execute(held).all())
        lost = self._over([(row.number, row.lease_by, row.lease_until) for row in rows], dead)
        if not lost:
            return []

        def write(session: Session) -> list[JobRow]:
            jobs = session.scalars(select(JobRow).where(JobRow.number.in_(lost))).all()
            still = [job for job in jobs if (job.lease_by, job.lease_until) == lost[job.number]]
            return [job for job in still if self._recover(session, job)]

        return await self._database.write(write)

    def _over(
        self, held: Sequence[tuple[int, str | None, float | None]], dead: Collection[str]
    ) -> dict[int, tuple[str | None, float | None]]:
        moment, before = self._clock(), self._seen
        self._seen = {}
        over: dict[int, tuple[str | None, float | None]] = {}
        for number, holder, until in held:
            seen = before.get(number)
            if seen is None or (seen.holder, seen.until) != (holder, until):
                seen = _Seen(holder, until, moment)
            self._seen[number] = seen
            if holder is None or holder in dead or moment - seen.since > LEASE_S:
                over[number] = (holder, until)
        return over

    def _recover(self, session: Session, job: JobRow) -> bool:
        same = (
            JobRow.lease_by == job.lease_by,
            JobRow.lease_until == job.lease_until,
            JobRow.status.not_in(FINAL),
        )
        num = job.num_interruptions + 1
        if job.cancel_requested:
            event, values = cancelled(self._ttl_s)
        elif num < MAX_INTERRUPTIONS and (job.reruns or job.status != JobStatus.RUNNING):
            event = now(JobStatus.QUEUED, _DIED)
            values = {"lease_by": None, "lease_until": None, "started_at": None}
        else:
            event, values = ended(
                JobStatus.ERROR, self._ttl_s, code=ErrorCode.INTERRUPTED, message=_INTERRUPTED
            )
        return change(session, job.number, *same, events=[event], num_interruptions=num, **values)

    def _free(self, session: Session, number: int, events: Sequence[JobEvent], **values: object) -> bool:
        """Release a lease and requeue, or cancel if that was requested; return whether the lease was held."""
        mine = JobRow.lease_by == self._holder
        freed = {"lease_by": None, "lease_until": None, **values}
        if change(session, number, mine, JobRow.cancel_requested.is_(False), events=events, **freed):
            return True
        event, ending = cancelled(self._ttl_s)
        return change(session, number, mine, events=[event], **ending)

    async def _change(self, job: JobRow, events: Sequence[JobEvent], **values: object) -> None:
        if not await self._database.write(
            lambda session: change(
                session, job.number, JobRow.lease_by == self._holder, events=events, **values
            )
        ):
            raise LeaseLostError(job.id)


def kind_of(job: JobRow) -> JobKind:
    return job.head["dialect"], job.head["kind"]


def _is_of(kind: JobKind) -> ColumnElement[bool]:
    dialect, name = kind
    return and_(JobRow.head["dialect"].as_string() == dialect, JobRow.head["kind"].as_string() == name)


def _by_owner(
    session: Session, value: ColumnElement[Any], *conditions: ColumnElement[bool]
) -> dict[str, float]:
    rows = session.execute(select(JobRow.owner, value).where(*conditions).group_by(JobRow.owner))
    return {row[0]: row[1] for row in rows}
