"""Jobs in the database, as the servers that run them see them: claimed, kept, told of, ended, given back.

Whoever runs a job holds its lease. Everything it writes asks for the lease in the same statement, so a server
that was taken for dead, and whose job another has begun anew, changes nothing any more.

A lease is over when somebody has looked at it for so long without seeing it renewed, by a clock of their own
that only goes forward: machines' clocks differ, and jump, and neither may end a job or keep one from running.
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
from app.storage.job_states import FINAL, cancelled, change, ended, now
from app.storage.tables import JobRow

JobKind = tuple[str, str]
"""The dialect and the kind of a job's request; those that share both run on one engine, in one queue."""

LEASE_S: Final = 30.0
"""After so long without a word of its holder a lease is over."""

MAX_INTERRUPTIONS: Final = 3
"""A job that was running when the server died, so often, does not begin by itself again: it may be why."""

_STOPPED: Final = "The server or its engine stopped; the job runs again when one serves its model."
_DIED: Final = "The server died; the job runs again."
_INTERRUPTED: Final = (
    "The server died while the job ran, and what its blocks had computed is lost. POST …/rerun runs it "
    "again; a job submitted with ?rerun=true does so by itself, though not for ever."
)


@dataclasses.dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended; ``result_bytes`` is None where it has no result."""

    status: JobStatus
    message: str | None = None
    code: ErrorCode | str | None = None
    result_bytes: int | None = None


class _Seen(NamedTuple):
    """A lease that somebody else holds, and when it was first seen as it is."""

    holder: str | None
    until: float | None
    since: float


class LeaseLostError(Exception):
    """Another server runs the job."""


class JobLeases:
    """The jobs that this process runs.

    Args:
        database: Has the tables.
        holder: This process, as no other is called.
        ttl_s: How long a job is kept after its end.
        clock: Never goes back.
    """

    def __init__(
        self, database: Database, *, holder: str, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Hold nothing yet."""
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
        """Take the job that is next, or None where none waits.

        Owners take turns: the one with the fewest running jobs, then the one served longest ago.

        Args:
            model: Jobs of other models stay.
            served_at: When each owner's last job was claimed here.
            without: Jobs of these kinds stay.
            without_keys: So do jobs of these keys.
            without_owners: And those of these owners.
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
            # Another server may claim at the same time, where the database lets two write at once: each
            # looks past what the other is about to take.
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

    async def tell(self, job: JobRow, events: Sequence[JobEvent]) -> None:
        """Add events to a job.

        Raises:
            LeaseLostError: It is no longer ours.
        """
        values: dict[str, object] = {}
        for event in events:
            if event.engine is not None:
                values["engine"] = event.engine
            if event.status is JobStatus.RUNNING and job.started_at is None:
                values["started_at"] = job.started_at = event.time
        await self._change(job, events, **values)

    async def end(self, job: JobRow, end: JobEnd) -> JobEvent:
        """Write down how a job ended, and give up its lease.

        Returns:
            The event that tells of it.

        Raises:
            LeaseLostError: It was no longer ours.
        """
        event, values = ended(end.status, self._ttl_s, code=end.code, message=end.message)
        await self._change(job, [event], result_bytes=end.result_bytes, **values)
        return event

    async def give_back(self, job: JobRow, *, was_interrupted: bool) -> None:
        """Let a job wait again, so that another server, or this one after a restart, runs it.

        One that was to be cancelled meanwhile ends so.

        Args:
            job: The job.
            was_interrupted: Whether it may be why it could not go on.

        Raises:
            LeaseLostError: It was no longer ours.
        """
        values = {"started_at": None, "num_interruptions": JobRow.num_interruptions + int(was_interrupted)}
        if not await self._database.write(
            lambda session: self._free(session, job.number, [now(JobStatus.QUEUED, _STOPPED)], **values)
        ):
            raise LeaseLostError(job.id)

    async def put_back(self, job: JobRow) -> None:
        """Let a job wait on that was claimed and not begun."""
        await self._database.write(
            lambda session: self._free(session, job.number, [], attempt=JobRow.attempt - 1)
        )

    async def give_back_all(self) -> None:
        """Let go of whatever was claimed and never begun."""

        def write(session: Session) -> None:
            never_begun = select(JobRow.number).where(
                JobRow.lease_by == self._holder, JobRow.status == JobStatus.QUEUED.value
            )
            for number in session.scalars(never_begun).all():
                self._free(session, number, [])

        await self._database.write(write)

    async def renew(self, ids: Collection[str]) -> None:
        """Say that this process lives and still runs these jobs."""

        def write(session: Session) -> None:
            session.execute(
                update(JobRow)
                .where(JobRow.id.in_(ids), JobRow.lease_by == self._holder)
                .values(lease_until=time.time() + LEASE_S)
            )

        await self._database.write(write)

    async def look(self, ids: Collection[str]) -> dict[str, bool]:
        """Return which of these jobs are still ours, and of each whether it is to be ended."""
        mine = select(JobRow.id, JobRow.cancel_requested).where(
            JobRow.id.in_(ids), JobRow.lease_by == self._holder
        )
        rows = await self._database.read(lambda session: session.execute(mine).all())
        return {row.id: row.cancel_requested for row in rows}

    async def recover(self, *, dead: Collection[str] = (), own: Collection[str] = ()) -> list[JobRow]:
        """Take the jobs of dead servers in hand: those that had begun have failed, the others wait again.

        Args:
            dead: Processes known to be dead, whatever their leases say.
            own: Jobs that this process runs; its other leases are left over from a fault.

        Returns:
            The jobs as they were; what their last attempts had written of a result is not whole.
        """
        held = select(JobRow.number, JobRow.lease_by, JobRow.lease_until).where(
            or_(
                JobRow.lease_by.is_not(None),
                # Given back, by an older version of this server, though it was to end.
                and_(JobRow.cancel_requested, JobRow.status.not_in(FINAL)),
            ),
            JobRow.id.not_in(own),
        )
        # Nothing is lost most of the time, and a look at it writes nothing.
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
        """Return those of the leases that are over, and remember since when the others are as they are."""
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
        """Give up a lease: the job waits, or ends where that was asked for; returns whether it was ours."""
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
    """Return what kind of job one is."""
    return job.head["dialect"], job.head["kind"]


def _is_of(kind: JobKind) -> ColumnElement[bool]:
    dialect, name = kind
    return and_(JobRow.head["dialect"].as_string() == dialect, JobRow.head["kind"].as_string() == name)


def _by_owner(
    session: Session, value: ColumnElement[Any], *conditions: ColumnElement[bool]
) -> dict[str, float]:
    """Return a value of each owner's jobs that meet conditions."""
    rows = session.execute(select(JobRow.owner, value).where(*conditions).group_by(JobRow.owner))
    return {row[0]: row[1] for row in rows}


__all__ = ["LEASE_S", "MAX_INTERRUPTIONS", "JobEnd", "JobKind", "JobLeases", "LeaseLostError", "kind_of"]
