"""Following jobs: their events from any point on, as they are written, without gaps and without repeats.

Everything is read from the database; a follower is only woken when there is something to read. Events of this
process wake at once, those of other servers when the next look at the database finds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobEvent
from app.storage.jobs import JobStore

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_PAGE: Final = 500


@dataclasses.dataclass(slots=True)
class _Followed:
    """A job that is followed: how many of its events are known, and who is to be woken."""

    num_events: int = 0
    followers: set[asyncio.Event] = dataclasses.field(default_factory=set)


class JobFeed:
    """Who follows which job.

    Args:
        store: Has the events.
    """

    def __init__(self, store: JobStore) -> None:
        """Begin without followers."""
        self._store = store
        self._followed: dict[str, _Followed] = {}
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_followers(self) -> int:
        """How many follow a job now."""
        return sum(len(job.followers) for job in self._followed.values())

    def told(self, job_id: str) -> None:
        """Wake those who follow a job: there is something to read."""
        if job_id in self._followed:
            for follower in self._followed[job_id].followers:
                follower.set()

    async def follow(self, job_id: str, owner: str, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Yield a job's events after its event number ``after``, up to the job's end.

        Ends early where the job is removed or the server stops.
        """
        with self._following(job_id) as (job, news):
            while not self._is_closed:
                news.clear()
                try:
                    page = await self._store.events(job_id, owner, after=after, limit=_PAGE)
                except ApiError as error:
                    if error.code is ErrorCode.JOB_NOT_FOUND:
                        return
                    raise
                for event in page.events:
                    yield event
                    after = job.num_events = event.id
                if page.is_last:
                    return
                if not page.events:
                    await news.wait()

    async def close(self) -> None:
        """End all that is followed."""
        self._is_closed = True
        for job_id in self._followed:
            self.told(job_id)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    @contextlib.contextmanager
    def _following(self, job_id: str) -> Iterator[tuple[_Followed, asyncio.Event]]:
        news = asyncio.Event()
        job = self._followed.setdefault(job_id, _Followed())
        job.followers.add(news)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="job-feed")
        try:
            yield job, news
        finally:
            job.followers.discard(news)
            if not job.followers:
                self._followed.pop(job_id, None)

    async def _look(self) -> None:
        """Find out about other servers' events for as long as there are followers."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._followed:
                return
            try:
                await self._wake_changed(list(self._followed))
            except Exception:
                logger.exception("the database cannot be asked for news of jobs; asking again")

    async def _wake_changed(self, ids: list[str]) -> None:
        for start in range(0, len(ids), _PAGE):
            chunk = ids[start : start + _PAGE]
            counts = await self._store.num_events(chunk)
            for job_id in chunk:
                job = self._followed.get(job_id)
                # One that is gone has followers to be sent home.
                if job is not None and counts.get(job_id, -1) != job.num_events:
                    self.told(job_id)


__all__ = ["JobFeed"]
