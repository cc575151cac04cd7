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
_UNREAD, _GONE = -1, -2


@dataclasses.dataclass(slots=True, eq=False)
class _Follower:
    """Who follows a job: how many events it had when they last looked, and what wakes them."""

    num_events: int = _UNREAD
    news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class JobFeed:
    """Who follows which job.

    Args:
        store: Has the events.
    """

    def __init__(self, store: JobStore) -> None:
        """Begin without followers."""
        self._store = store
        self._followers: dict[str, set[_Follower]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_followers(self) -> int:
        """How many follow a job now."""
        return sum(len(followers) for followers in self._followers.values())

    def told(self, job_id: str) -> None:
        """Wake those who follow a job: there is something to read."""
        for follower in self._followers.get(job_id, ()):
            follower.news.set()

    async def follow(self, job_id: str, owner: str, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Yield a job's events after its event number ``after``, up to the job's end.

        Ends early where the job is removed or the server stops. A number that no event has yet is waited
        past.
        """
        with self._following(job_id) as follower:
            while not self._is_closed:
                follower.news.clear()
                try:
                    page = await self._store.events(job_id, owner, after=after, limit=_PAGE)
                except ApiError as error:
                    if error.code is ErrorCode.JOB_NOT_FOUND:
                        return
                    raise
                follower.num_events = page.num_events
                for event in page.events:
                    yield event
                    after = event.id
                if page.is_last:
                    return
                if not page.events or after >= page.num_events:
                    await follower.news.wait()

    async def close(self) -> None:
        """End all that is followed."""
        self._is_closed = True
        for job_id in self._followers:
            self.told(job_id)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    @contextlib.contextmanager
    def _following(self, job_id: str) -> Iterator[_Follower]:
        follower = _Follower()
        followers = self._followers.setdefault(job_id, set())
        followers.add(follower)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="job-feed")
        try:
            yield follower
        finally:
            followers.discard(follower)
            if not followers:
                self._followers.pop(job_id, None)

    async def _look(self) -> None:
        """Find out about other servers' events for as long as there are followers."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._followers:
                return
            try:
                await self._wake_changed(list(self._followers))
            except Exception:
                logger.exception("the database cannot be asked for news of jobs; asking again")

    async def _wake_changed(self, ids: list[str]) -> None:
        for start in range(0, len(ids), _PAGE):
            chunk = ids[start : start + _PAGE]
            counts = await self._store.num_events(chunk)
            for job_id in chunk:
                for follower in self._followers.get(job_id, ()):
                    # Each has its own count: what one has read the next may not know of. One whose job is
                    # gone is sent home.
                    if counts.get(job_id, _GONE) != follower.num_events:
                        follower.news.set()


__all__ = ["JobFeed"]
