"""Removal of jobs with their files: expired ones, deleted ones, and files that belong to no job."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from app.storage.database import Database
from app.storage.jobs.files import ORPHAN_S, JobFiles
from app.storage.jobs.removal import JobRemoval, RemovedJobs

logger = logging.getLogger(__name__)

_MAX_SWEEP_S: Final = 60.0


class JobCleanup:
    def __init__(self, database: Database, files: JobFiles, *, ttl_s: float) -> None:
        self._jobs = JobRemoval(database)
        self._files = files
        self._interval_s = min(_MAX_SWEEP_S, max(0.05, ttl_s / 4))
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Remove files that belong to no job, count the others, and begin to remove expired jobs."""
        await self._remove_orphans()
        await self.count()
        self._sweeper = asyncio.create_task(self._sweep(), name="jobs-sweep")

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    async def count(self) -> None:
        """Update the stored bytes from the database, where other servers write too."""
        self._files.space.set_stored(await self._jobs.used_bytes())

    async def remove_ended(self, job_id: str) -> None:
        """Remove a job that its client deleted while it ran, after its end."""
        await self.remove_files(await self._jobs.remove_ended(job_id))

    async def remove_files(self, gone: RemovedJobs) -> None:
        await self._files.remove(gone.ids)
        for holder, num_bytes in gone.freed:
            self._files.space.free(num_bytes, holder)

    async def _remove_orphans(self) -> None:
        """Remove the files of servers that died between writing a job's files and inserting its row."""
        await self._files.remove_others(await self._jobs.known())

    async def _sweep(self) -> None:
        others_at = time.monotonic()
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                while (gone := await self._jobs.remove_expired(time.time())).ids:
                    await self.remove_files(gone)
                await self.count()
                if time.monotonic() - others_at > ORPHAN_S:
                    others_at = time.monotonic()
                    await self._remove_orphans()
            except Exception:
                logger.exception("removing expired jobs failed; retrying")


__all__ = ["JobCleanup"]
