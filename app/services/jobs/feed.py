"""Following jobs: their events from any number on, as they are written, without gaps or repeats.

All events are read from the database. Events of this process wake followers at once, those of other servers
at the next poll of the database.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobEvent
from app.storage.jobs.store import JobStore

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_PAGE: Final = 500
_UNREAD, _GONE = -1, -2
"""In place of a number of events: of a follower before its first read, of a job that was removed."""


class JobFeed:
    """``followers`` has those of each job: what wakes them, and how many events they know of."""

    def __init__(self, store: JobStore) -> None:
        store.on_change = self._notify
        self.followers: dict[str, dict[asyncio.Event, int]] = {}
        self._store = store
        self._polling: asyncio.Task[None] | None = None
        self._is_closed = False

    async def follow(self, job_id: str, owner: str, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Yield a job's events after number ``after``, up to the end of the job or of the server.

        If ``after`` is beyond the last event, waits until the job has events with higher numbers.
        """
        changed, followers = asyncio.Event(), self.followers.setdefault(job_id, {})
        followers[changed] = _UNREAD
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll(), name="job-feed")
        try:
            while not self._is_closed:
                changed.clear()
                page = await self._store.events(job_id, owner, after=after, limit=_PAGE)
                followers[changed] = page.num_events
                for event in page.events:
                    yield event
                    after = event.id
                if page.is_last:
                    return
                if not page.events or after >= page.num_events:
                    await changed.wait()
        except ApiError as error:
            if error.code is not ErrorCode.JOB_NOT_FOUND:
                raise
        finally:
            del followers[changed]
            if not followers:
                del self.followers[job_id]

    async def close(self) -> None:
        self._is_closed = True
        for job_id in self.followers:
            self._notify(job_id)
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)

    def _notify(self, job_id: str) -> None:
        """Wake the followers of a job; the store calls it for each change by this process."""
        for changed in self.followers.get(job_id, ()):
            changed.set()

    async def _poll(self) -> None:
        """Wake followers of jobs with events by other servers, once a second while there are followers."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self.followers:
                return
            try:
                await self._wake_changed(list(self.followers))
            except Exception:
                logger.exception("polling the database for job events failed; retrying")

    async def _wake_changed(self, ids: list[str]) -> None:
        """Wake the followers that do not know the number of events that their job has in the database."""
        for start in range(0, len(ids), _PAGE):
            chunk = ids[start : start + _PAGE]
            counts = await self._store.num_events(chunk)
            for job_id in chunk:
                for changed, num_events in self.followers.get(job_id, {}).items():
                    # One follower may know of events that another has not read. One whose job was removed is
                    # woken to end; one in its first read needs no waking.
                    if num_events not in {_UNREAD, counts.get(job_id, _GONE)}:
                        changed.set()
