"""Names with versions in the database, one kind of thing for each ``VersionTable``.

A version never changes, and its number is never reused. A name that a tenant has used stays its own even
after its versions are removed, and a shared one stays with the tenant that shared it: a removal never makes
a name refer to a version of another tenant. Methods take the session of their caller's transaction.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.fields import Reference
from app.limits.allowances import Allowance
from app.storage.database import Database
from app.storage.quotas import Holder
from app.storage.tables import StoredNameRow, VersionRow

_ID_BYTES: Final = 12

T = TypeVar("T")
NameT = TypeVar("NameT", bound=StoredNameRow)
RowT = TypeVar("RowT", bound=VersionRow)


class NameUsedError(Exception):
    """A version was to be the first of a name that its tenant has used before."""


class VersionTable(Generic[NameT, RowT]):
    """The versions of one kind; ``beside`` are tables of versions that the same allowance counts."""

    def __init__(
        self,
        names: type[NameT],
        rows: type[RowT],
        *,
        kind: str,
        plural: str,
        prefix: str,
        not_found: ErrorCode,
        name_taken: ErrorCode,
        beside: Sequence[type[VersionRow]] = (),
    ) -> None:
        self._names = names
        self.rows = rows
        self._counted: tuple[type[VersionRow], ...] = (rows, *beside)
        self._kind = kind
        self._plural = plural
        self._prefix = prefix
        self._not_found = not_found
        self._name_taken = name_taken
        self._id = re.compile(rf"{prefix}[0-9a-f]{{{2 * _ID_BYTES}}}")

    def new_id(self) -> str:
        return f"{self._prefix}{secrets.token_hex(_ID_BYTES)}"

    def check_room(self, session: Session, allowance: Allowance, num_bytes: int, tenant: str) -> None:
        stored, own = 0, 0
        for rows in self._counted:
            total = select(func.coalesce(func.sum(rows.num_bytes), 0))
            stored += int(session.scalar(total) or 0)
            own += int(session.scalar(total.where(rows.tenant == tenant)) or 0) if tenant else 0
        allowance.check_total(stored, num_bytes)
        allowance.check(tenant, own, num_bytes)

    def next_version(
        self, session: Session, tenant: str, name: str, *, shared: bool, is_first: bool = False
    ) -> int:
        """Return the number of a name's next version.

        Raises:
            ApiError: ``name_taken``: it is to be shared, and another tenant has shared one of that name.
            NameUsedError: ``is_first``, and there were versions, removed ones included.
        """
        if shared:
            self._check_name(session, tenant, name)
        row = session.get(self._names, (tenant, name), with_for_update=True)
        if row is None:
            row = self._names(tenant=tenant, name=name, versions=0, shared=False)
            session.add(row)
        elif is_first:
            raise NameUsedError(name)
        row.versions += 1
        row.shared |= shared
        return row.versions

    def _check_name(self, session: Session, tenant: str, name: str) -> None:
        """Reject a name that would refer to versions of two tenants for all others, now or over time."""
        names = self._names
        others = select(names.tenant).where(
            names.name == name, names.shared.is_(True), names.tenant != tenant
        )
        if session.scalars(others.limit(1)).first() is not None:
            raise ApiError(
                self._name_taken,
                f"Another tenant has shared a {self._kind} {name!r}; share this one by another name.",
                "name",
            )

    def page(
        self, session: Session, tenant: str, *, name: str | None, after: str | None, limit: int
    ) -> Sequence[RowT]:
        """Return a tenant's rows and shared ones, newest first; ``not_found`` for an invisible ``after``."""
        wanted: list[ColumnElement[bool]] = [self._seen_by(tenant)]
        if name is not None:
            wanted.append(self.rows.name == name)
        if after is not None:
            wanted.append(self.rows.number < self.row(session, after, tenant, "after").number)
        newest_first = select(self.rows).where(*wanted).order_by(self.rows.number.desc())
        return session.scalars(newest_first.limit(limit)).all()

    def get(self, session: Session, id_: str, tenant: str) -> RowT | None:
        if not self._id.fullmatch(id_):  # a database may refuse to compare text that cannot be an id
            return None
        return session.scalars(select(self.rows).where(self.rows.id == id_, self._seen_by(tenant))).first()

    def row(self, session: Session, id_: str, tenant: str, param: str | None = None) -> RowT:
        row = self.get(session, id_, tenant)
        if row is None:
            kind = self._kind
            message = f"There is no {kind} {clip(id_)!r}; GET /v1/{self._plural} lists them."
            raise ApiError(self._not_found, message, param)
        return row

    def data(self, session: Session, number: int) -> bytes | None:
        return session.scalar(select(self.rows.data).where(self.rows.number == number))

    def find(self, session: Session, reference: Reference, tenant: str, models: Sequence[str]) -> RowT | None:
        """Resolve a name for a tenant: to its own versions if it ever had one, otherwise to shared ones.

        One for another model than ``models`` is returned only if there is none for this one.
        """
        rows = self.rows
        is_own = session.get(self._names, (tenant, reference.name)) is not None
        of_whom = rows.tenant == tenant if is_own else rows.shared.is_(True)
        wanted = [rows.name == reference.name, of_whom]
        if reference.version is not None:
            wanted.append(rows.version == reference.version)
        best_first = rows.model.in_(models).desc(), rows.version.desc()
        return session.scalars(select(rows).where(*wanted).order_by(*best_first).limit(1)).first()

    def newest(self, session: Session, tenant: str, models: Sequence[str], limit: int) -> list[RowT]:
        """Return the version that each name means; ``limit`` is the number of newest ones looked at."""
        rows = self.rows
        seen = select(rows).where(self._seen_by(tenant), rows.model.in_(models)).order_by(rows.number.desc())
        own = set(session.scalars(select(self._names.name).where(self._names.tenant == tenant)))
        found: dict[str, RowT] = {}
        for row in session.scalars(seen.limit(limit)):
            if (row.tenant == tenant) == (row.name in own):
                found.setdefault(row.name, row)
        return list(found.values())

    def used_bytes(self, session: Session) -> dict[Holder, int]:
        wanted = select(self.rows.tenant, func.sum(self.rows.num_bytes)).group_by(self.rows.tenant)
        return {Holder(tenant): int(num_bytes or 0) for tenant, num_bytes in session.execute(wanted).all()}

    def _seen_by(self, tenant: str) -> ColumnElement[bool]:
        return or_(self.rows.tenant == tenant, self.rows.shared.is_(True))


async def write_version(database: Database, write: Callable[[Session], T]) -> T:
    """Write a new version; once more if its name was created meanwhile, where writers are concurrent."""
    try:
        return await database.write(write)
    except IntegrityError:
        return await database.write(write)


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
