"""Names with versions in the database, one kind of thing for each ``VersionTable``.

A version never changes, and its number is never reused. A name that a tenant has used stays its own even
after its versions are removed, and a shared one stays with the tenant that shared it: a removal never makes
a name refer to a version of another tenant. Methods take the session of their caller's transaction.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from api_schemas.names import Reference
from app.allowance import Allowance
from app.storage.database import Database
from app.storage.storage_usage import Holder
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


__all__ = ["NameUsedError", "VersionTable", "write_version"]
