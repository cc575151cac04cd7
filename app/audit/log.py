"""Records on their way to the database: nobody waits for it, and no more are kept than fit.

A task writes what came within a second in one transaction. What runs for longer is written down before it
has ended, and again then: a server that dies of a request does not take the record of it along. Where the
database does not take them they are kept up to a limit; how many were lost beyond it is a record too.
``create_app`` owns the one instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from app.audit.records import Record
from app.storage.audit import AuditStore

logger = logging.getLogger(__name__)

_GATHER_S: Final = 1.0
_MAX_PENDING: Final = 20_000
_MAX_BATCH: Final = 1000
_RETRY_S: Final = 5.0
_SWEEP_S: Final = 3600.0
_UNDER_WAY: Final = "under_way"
_KNOWN: Final = ("tenant", "key_id", "route", "subject", "model", "operations", "code_sha256")
"""What is learned of a request while it runs, and written down again when it changes."""


@dataclasses.dataclass(slots=True)
class _Entry:
    """A record, and what the database has of it.

    Attributes:
        record: It.
        row: What is to be written, once it has ended.
        number: Its place in the log, once it has one.
        known: What was known when it was written last.
    """

    record: Record
    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    number: int | None = None
    known: tuple[Any, ...] | None = None

    def learned(self) -> tuple[Any, ...]:
        return tuple(getattr(self.record, name) for name in _KNOWN)


class AuditLog:
    """The records of one server.

    Args:
        store: Keeps them.
        ttl_s: For how long; 0 if there are to be none.
    """

    def __init__(self, store: AuditStore, ttl_s: float) -> None:
        """Begin without records."""
        self._store = store
        self._ttl_s = ttl_s
        self._pending: list[_Entry] = []
        self._running: dict[str, _Entry] = {}
        self._num_lost = 0
        self._come = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @property
    def is_on(self) -> bool:
        """Whether anything is written down."""
        return self._ttl_s > 0

    def begin(self, record: Record) -> None:
        """Take note of something that begins; ``add`` or ``drop`` its record in the end."""
        if self.is_on:
            self._running[record.request_id] = _Entry(record)
            self._come.set()

    def add(self, record: Record) -> None:
        """Have a record written down soon, of something that has ended."""
        if not self.is_on:
            return
        entry = self._running.pop(record.request_id, None) or _Entry(record)
        if len(self._pending) >= _MAX_PENDING:
            self._num_lost += 1
            return
        entry.row = record.row()
        self._pending.append(entry)
        self._come.set()

    def drop(self, record: Record) -> None:
        """Forget what began and is not worth a record, unless it has one by now; harmless after ``add``."""
        entry = self._running.get(record.request_id)
        if entry is None:
            return
        if entry.known is None:
            del self._running[record.request_id]
        else:
            self.add(record)

    def start(self) -> None:
        """Begin to write; called inside the running event loop, with the database open."""
        self._task = asyncio.create_task(self._keep(), name="audit")

    async def stop(self) -> None:
        """Write what is left; harmless when repeated."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await self.flush()
        except Exception:
            logger.exception("%d records of the audit log are lost", len(self._pending))

    async def flush(self) -> None:
        """Write what there is now."""
        async with self._turn:  # or two would write the same
            await self._flush()

    async def _flush(self) -> None:
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            record = Record("", route="lost", details={"records": lost})
            self._pending.append(_Entry(record, record.row()))
        if begun := [entry for entry in self._running.values() if _is_news(entry)]:
            await _to_its_end(self._write_begun(begun))
        while batch := self._pending[:_MAX_BATCH]:
            await _to_its_end(self._write_ended(batch))

    async def _write_begun(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            entry.known = entry.learned()
            entry.row = entry.record.row() | {"error": entry.record.error or _UNDER_WAY}
        try:
            await self._write(entries)
        except BaseException:
            for entry in entries:
                entry.known = None
            raise

    async def _write_ended(self, entries: Sequence[_Entry]) -> None:
        await self._write(entries)
        del self._pending[: len(entries)]

    async def _write(self, entries: Sequence[_Entry]) -> None:
        new = [entry for entry in entries if entry.number is None]
        changed = [{**entry.row, "number": entry.number} for entry in entries if entry.number is not None]
        numbers = await self._store.write([entry.row for entry in new], changed)
        for entry, number in zip(new, numbers, strict=True):
            entry.number = number

    async def _keep(self) -> None:
        swept_at = -_SWEEP_S
        while True:
            try:
                if time.monotonic() - swept_at > _SWEEP_S:
                    swept_at = time.monotonic()
                    await self._store.expire(time.time() - self._ttl_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._come.wait(), _SWEEP_S)
                await asyncio.sleep(_GATHER_S)
                self._come.clear()
                await self.flush()
                if self._running:
                    self._come.set()
            except Exception:
                logger.exception("the audit log could not be written; trying again")
                self._come.set()
                await asyncio.sleep(_RETRY_S)


def _is_news(entry: _Entry) -> bool:
    """Tell whether something has run for so long, for somebody who is known, that it is written down now."""
    record = entry.record
    if not record.key_id or time.time() - record.time < _GATHER_S:
        return False
    return entry.known != entry.learned()


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await what must not be done half: what is on its way gets there, and is not written a second time."""
    writing = asyncio.ensure_future(work)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        raise


__all__ = ["AuditLog"]
