"""Records on their way to the database: nobody waits for it, and no more are kept than fit.

A task writes what came within a second in one transaction. Where the database does not take them they are
kept up to a limit; how many were lost beyond it is a record too. ``create_app`` owns the one instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Final

from app.audit.records import Record
from app.storage.audit import AuditStore

logger = logging.getLogger(__name__)

_GATHER_S: Final = 1.0
_MAX_PENDING: Final = 20_000
_MAX_BATCH: Final = 1000
_RETRY_S: Final = 5.0
_SWEEP_S: Final = 3600.0


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
        self._pending: list[dict[str, Any]] = []
        self._num_lost = 0
        self._come = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @property
    def is_on(self) -> bool:
        """Whether anything is written down."""
        return self._ttl_s > 0

    def add(self, record: Record) -> None:
        """Have a record written down soon."""
        if not self.is_on:
            return
        if len(self._pending) >= _MAX_PENDING:
            self._num_lost += 1
            return
        self._pending.append(record.row())
        self._come.set()

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
            self._pending.append(Record("", route="lost", details={"records": lost}).row())
        while batch := self._pending[:_MAX_BATCH]:
            writing = asyncio.ensure_future(self._store.write(batch))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                # What is on its way gets there, and must not be written a second time.
                await writing
                del self._pending[: len(batch)]
                raise
            del self._pending[: len(batch)]

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
            except Exception:
                logger.exception("the audit log could not be written; trying again")
                self._come.set()
                await asyncio.sleep(_RETRY_S)


__all__ = ["AuditLog"]
