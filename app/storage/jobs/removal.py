from __future__ import annotations

import dataclasses
from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from app.storage.database import Database
from app.storage.jobs.files import JOB_BYTES
from app.storage.jobs.states import FINAL
from app.storage.storage_usage import Holder
from app.storage.tables import JobRow

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


__all__ = ["JobRemoval", "RemovedJobs", "removed"]
