"""The events of one run on their way to the database; prints count against the storage limits of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from api_schemas.errors import ApiError
from api_schemas.jobs import JobEvent
from app.storage.disk_quota import DiskQuota
from app.storage.jobs.leases import LeaseLostError
from app.storage.jobs.states import size_of
from app.storage.storage_usage import Holder

_MAX_PENDING: Final = 500
_MAX_LINES: Final = 10_000
_MAX_CHARS: Final = 16 * 2**20
_NOT_KEPT: Final = "… (what the block prints from here on is not kept{why})"


class JobPrints:
    def __init__(self, space: DiskQuota, holder: Holder) -> None:
        self._space = space
        self._holder = holder
        self._num_lines = 0
        self._num_chars = 0
        self._num_taken = 0
        self._is_full = False

    def admit(self, event: JobEvent) -> bool:
        """Return whether a printed line is written; the first line beyond a limit becomes a notice."""
        if self._is_full:
            return False
        self._num_lines += 1
        self._num_chars += len(event.message or "")
        if self._num_lines > _MAX_LINES or self._num_chars > _MAX_CHARS:
            self._end_with(event)
            return True
        num_bytes = size_of([event])
        try:
            self._space.take(num_bytes, self._holder)
        except ApiError as error:
            self._end_with(event, f": {error.message}")
        else:
            self._num_taken += num_bytes
        return True

    def _end_with(self, event: JobEvent, why: str = "") -> None:
        self._is_full = True
        event.message = _NOT_KEPT.format(why=why)

    def written(self, events: Sequence[JobEvent]) -> None:
        num_bytes = size_of(events)
        self._give_up(min(num_bytes, self._num_taken))
        self._space.add(num_bytes, self._holder)

    def close(self) -> None:
        """Release the reservation of lines that were not written; idempotent."""
        self._give_up(self._num_taken)

    def _give_up(self, num_bytes: int) -> None:
        self._num_taken -= num_bytes
        self._space.give_up(num_bytes, self._holder)


class EventWriter:
    """Writes the events of one run in order; those that arrive during a write go into the next batch."""

    def __init__(self, write: Callable[[list[JobEvent]], Awaitable[None]]) -> None:
        self._write = write
        self._pending: list[JobEvent] = []
        self._writing: asyncio.Task[None] | None = None

    async def add(self, event: JobEvent) -> None:
        """Queue an event; waits only while the backlog is long. Raises LeaseLostError.

        Other write errors do not end a job: the events are written with the next batch, or by ``settle``.
        """
        writing = self.put(event)
        if len(self._pending) >= _MAX_PENDING:
            await asyncio.wait([writing])
        if writing.done() and isinstance(writing.exception(), LeaseLostError):
            writing.result()

    def put(self, event: JobEvent) -> asyncio.Task[None]:
        self._pending.append(event)
        before = self._writing
        if before is None or (before.done() and not isinstance(before.exception(), LeaseLostError)):
            self._writing = before = asyncio.create_task(self._drain())
        return before

    async def settle(self) -> None:
        """Wait until all events are written; raises the write's error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing
        await self._drain()

    async def _drain(self) -> None:
        while batch := self._pending[:]:
            await self._write(batch)
            # Deleted only after the write: events that could not be written stay pending.
            del self._pending[: len(batch)]
