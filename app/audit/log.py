"""Writes audit records asynchronously, with a bounded queue, about one transaction per second.

A request that runs for longer is written before its end, so that a crash does not lose the record of the
request that may have caused it. Beyond the limit of the queue, the number of lost records is recorded.
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
"""Attributes that are set while a request runs; changes of them are written before its end."""


@dataclasses.dataclass(slots=True)
class _AuditEntry:
    """``known`` has the values of ``_KNOWN`` when the row was last written before the end."""

    record: Record
    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    number: int | None = None
    known: tuple[Any, ...] | None = None

    def mutable_columns(self) -> tuple[Any, ...]:
        return tuple(getattr(self.record, name) for name in _KNOWN)


class AuditLog:
    """The audit records of one server; ``ttl_s`` of 0 disables the log."""

    def __init__(self, store: AuditStore, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._pending: list[_AuditEntry] = []
        self._running: dict[str, _AuditEntry] = {}
        self._num_lost = 0
        self._item_added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @property
    def is_on(self) -> bool:
        return self._ttl_s > 0

    def begin(self, record: Record) -> None:
        """Register a request that begins; ``add`` or ``drop`` must follow."""
        if self.is_on:
            self._running[record.request_id] = _AuditEntry(record)
            self._item_added.set()

    def add(self, record: Record) -> None:
        if not self.is_on:
            return
        entry = self._running.pop(record.request_id, None) or _AuditEntry(record)
        # A known row is always updated: it would remain marked as unfinished.
        if len(self._pending) >= _MAX_PENDING and entry.known is None:
            self._num_lost += 1
            return
        entry.row = record.row()
        self._pending.append(entry)
        self._item_added.set()

    def drop(self, record: Record) -> None:
        """Unregister a request that needs no record, unless it was written; no effect after ``add``."""
        entry = self._running.get(record.request_id)
        if entry is None:
            return
        if entry.known is None:
            del self._running[record.request_id]
        else:
            self.add(record)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run_writer(), name="audit")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await self.flush()
        except Exception:
            logger.exception("%d audit records were lost", len(self._pending))

    async def flush(self) -> None:
        async with self._turn:  # concurrent flushes would write the same records
            await self._flush()

    async def _flush(self) -> None:
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            record = Record("", route="lost", details={"records": lost})
            self._pending.append(_AuditEntry(record, record.row()))
        if started := [entry for entry in self._running.values() if _is_due(entry)]:
            await _uninterrupted(self._write_started(started))
        while batch := self._pending[:_MAX_BATCH]:
            await _uninterrupted(self._write_ended(batch))

    async def _write_started(self, entries: Sequence[_AuditEntry]) -> None:
        for entry in entries:
            entry.known = entry.mutable_columns()
            entry.row = entry.record.row() | {"error": entry.record.error or _UNDER_WAY}
        try:
            await self._write(entries)
        except BaseException:
            for entry in entries:
                entry.known = None
            raise

    async def _write_ended(self, entries: Sequence[_AuditEntry]) -> None:
        await self._write(entries)
        del self._pending[: len(entries)]

    async def _write(self, entries: Sequence[_AuditEntry]) -> None:
        new = [entry for entry in entries if entry.number is None]
        changed = [{**entry.row, "number": entry.number} for entry in entries if entry.number is not None]
        numbers = await self._store.write([entry.row for entry in new], changed)
        for entry, number in zip(new, numbers, strict=True):
            entry.number = number

    async def _run_writer(self) -> None:
        swept_at = -_SWEEP_S
        while True:
            try:
                if time.monotonic() - swept_at > _SWEEP_S:
                    swept_at = time.monotonic()
                    await self._store.expire(time.time() - self._ttl_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._item_added.wait(), _SWEEP_S)
                await asyncio.sleep(_GATHER_S)
                self._item_added.clear()
                await self.flush()
                if self._running:
                    self._item_added.set()
            except Exception:
                logger.exception("writing the audit log failed; retrying")
                self._item_added.set()
                await asyncio.sleep(_RETRY_S)


def _is_due(entry: _AuditEntry) -> bool:
    record = entry.record
    if not record.key_id or time.time() - record.time < _GATHER_S:
        return False
    return entry.known != entry.mutable_columns()


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` to its end even when cancelled, so that no record is written twice."""
    writing = asyncio.ensure_future(work)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        raise


__all__ = ["AuditLog"]
