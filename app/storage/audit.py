"""The audit log in the database: batched writes, paged reads, and expiry."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, delete, insert, select, update
from sqlalchemy.orm import Session

from api_schemas.administration import AuditEntry
from app.storage.database import Database
from app.storage.tables import AuditRow


@dataclasses.dataclass(frozen=True, slots=True)
class AuditFilter:
    """A filter; None matches all. ``since`` is inclusive, ``until`` exclusive, ``after`` means older ones."""

    tenant: str | None = None
    key_id: str | None = None
    since: float | None = None
    until: float | None = None
    after: int | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        compared: list[tuple[Any, Any, Callable[[Any, Any], Any]]] = [
            (AuditRow.tenant, self.tenant, operator.eq),
            (AuditRow.key_id, self.key_id, operator.eq),
            (AuditRow.time, self.since, operator.ge),
            (AuditRow.time, self.until, operator.lt),
            (AuditRow.number, self.after, operator.lt),
        ]
        return [compare(column, value) for column, value, compare in compared if value is not None]


class AuditStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def write(
        self, rows: Sequence[dict[str, Any]], changed: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Write new and ``changed`` records, which have a ``number``, and return the new numbers."""

        def write(session: Session) -> list[int]:
            if changed:
                session.execute(update(AuditRow), list(changed))
            if not rows:
                return []
            adding = insert(AuditRow).returning(AuditRow.number, sort_by_parameter_order=True)
            return list(session.scalars(adding, list(rows)))

        return await self._database.write(write)

    async def page(self, filter_: AuditFilter, *, limit: int) -> tuple[list[AuditEntry], bool]:
        """Return entries, newest first, and whether there are more."""

        def read(session: Session) -> list[AuditEntry]:
            newest_first = select(AuditRow).where(*filter_.conditions()).order_by(AuditRow.number.desc())
            return [AuditEntry.model_validate(row) for row in session.scalars(newest_first.limit(limit + 1))]

        entries = await self._database.read(read)
        return entries[:limit], len(entries) > limit

    async def expire(self, before: float) -> None:
        expired = delete(AuditRow).where(AuditRow.time < before)
        await self._database.write(lambda session: session.execute(expired))
