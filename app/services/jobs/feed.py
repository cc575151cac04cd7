"""Following jobs: their events from any number on, as they are written, without gaps or repeats.

All events are read from the database. Events of this process wake followers at once, those of other servers
at the next poll of the database.
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
from app.storage.jobs.store import JobStore

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_PAGE: Final = 500
_UNREAD, _GONE = -1, -2


@dataclasses.dataclass(slots=True, eq=False)
class _Follower:
    num_events: int = _UNREAD
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class JobFeed:
    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._followers: dict[str, set[_Follower]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_followers(self) -> int:
        return sum(len(followers) for followers in self._followers.values())

    def notify(self, job_id: str) -> None:
        for follower in self._followers.get(job_id, ()):
            follower.changed.set()

    async def follow(self, job_id: str, owner: str, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Yield a job's events after number ``after``, up to the end of the job or of the server.

        If ``after`` is beyond the last event, waits until the job has events with higher numbers.
        """
        with self._following(job_id) as follower:
            while not self._is_closed:
                follower.changed.clear()
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
                    await follower.changed.wait()

    async def close(self) -> None:
        self._is_closed = True
        for job_id in self._followers:
            self.notify(job_id)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    @contextlib.contextmanager
    def _following(self, job_id: str) -> Iterator[_Follower]:
        follower = _Follower()
        followers = self._followers.setdefault(job_id, set())
        followers.add(follower)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._poll(), name="job-feed")
        try:
            yield follower
        finally:
            followers.discard(follower)
            if not followers:
                self._followers.pop(job_id, None)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._followers:
                return
            try:
                await self._wake_changed(list(self._followers))
            except Exception:
                logger.exception("polling the database for job events failed; retrying")

    async def _wake_changed(self, ids: list[str]) -> None:
        for start in range(0, len(ids), _PAGE):
            chunk = ids[start : start + _PAGE]
            counts = await self._store.num_events(chunk)
            for job_id in chunk:
                for follower in self._followers.get(job_id, ()):
                    # Followers compare their own counts: one may have read events that another has not. A
                    # follower whose job was removed is woken to end. One in its first read needs no waking.
                    if follower.num_events not in {_UNREAD, counts.get(job_id, _GONE)}:
                        follower.changed.set()
