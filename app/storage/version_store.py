from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from sqlalchemy.orm import Session

from api_schemas.names import Reference
from app.allowance import Allowance
from app.storage.database import Database
from app.storage.storage_usage import Holder
from app.storage.tables import VersionRow
from app.storage.versions import VersionTable, write_version

RowT = TypeVar("RowT", bound=VersionRow)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class NewVersion:
    """A version to be stored; ``is_first`` says whether it must be the first of its name."""

    tenant: str
    name: str
    model: str
    shared: bool
    data: bytes
    is_first: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class VersionStore(Generic[RowT, T]):
    """Versions of one kind, of all tenants; ``shown`` returns a row as the API shows it to a tenant."""

    def __init__(
        self,
        database: Database,
        allowance: Allowance,
        table: VersionTable[Any, RowT],
        shown: Callable[[RowT, str], T],
    ) -> None:
        self._database = database
        self._allowance = allowance
        self._table = table
        self._shown = shown

    async def insert(self, new: NewVersion, overhead_bytes: int = 0, **columns: Any) -> T:
        """Store a version as the next of its name, and return it as its tenant sees it.

        Raises:
            ApiError: The allowance's; ``name_taken``: another tenant has shared one of that name.
            NameUsedError: It must be the first of its name, and is not.
        """
        num_bytes = len(new.data) + overhead_bytes
        id_, sha256 = self._table.new_id(), new.sha256

        def write(session: Session) -> T:
            self._table.check_room(session, self._allowance, num_bytes, new.tenant)
            version = self._table.next_version(
                session, new.tenant, new.name, shared=new.shared, is_first=new.is_first
            )
            row = self._table.rows(
                id=id_, tenant=new.tenant, name=new.name, version=version, model=new.model,
                shared=new.shared, sha256=sha256, num_bytes=num_bytes, created_at=time.time(),
                data=new.data, **columns,
            )  # fmt: skip
            session.add(row)
            return self._shown(row, new.tenant)

        return await write_version(self._database, write)

    async def page(
        self, tenant: str, *, name: str | None, after: str | None, limit: int
    ) -> tuple[list[T], bool]:
        """Return a tenant's versions and shared ones, newest first, and whether there are more."""

        def read(session: Session) -> list[T]:
            rows = self._table.page(session, tenant, name=name, after=after, limit=limit + 1)
            return [self._shown(row, tenant) for row in rows]

        found = await self._database.read(read)
        return found[:limit], len(found) > limit

    async def get(self, id_: str, tenant: str) -> T:
        """Return a version visible to a tenant; raise the table's ``not_found``."""
        return await self._database.read(
            lambda session: self._shown(self._table.row(session, id_, tenant), tenant)
        )

    async def content(self, id_: str, tenant: str) -> tuple[T, bytes]:
        def read(session: Session) -> tuple[T, bytes]:
            row = self._table.row(session, id_, tenant)
            return self._shown(row, tenant), bytes(row.data)

        return await self._database.read(read)

    async def remove(self, id_: str, tenant: str) -> None:
        """Remove a version visible to a tenant; the caller checks the permission. Raises as ``get`` does."""
        await self._database.write(lambda session: session.delete(self._table.row(session, id_, tenant)))

    async def data(self, number: int) -> bytes | None:
        found = await self._database.read(lambda session: self._table.data(session, number))
        return None if found is None else bytes(found)

    async def used_bytes(self) -> dict[Holder, int]:
        return await self._database.read(self._table.used_bytes)

    def _named(
        self, session: Session, text: str, id_: str | None, tenant: str, models: Sequence[str]
    ) -> RowT | None:
        reference = Reference.parse(text)
        if reference is None:
            return None
        if id_ is None:
            return self._table.find(session, reference, tenant, models)
        row = self._table.get(session, id_, tenant)
        if row is None or reference not in {Reference(row.name), Reference(row.name, row.version)}:
            return None
        return row


__all__ = ["NewVersion", "VersionStore"]
