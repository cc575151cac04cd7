"""Named things with versions in the database, of several kinds in one table.

A version never changes, and its number is never reused. A name that a tenant has used stays its own even
after its versions are removed, and a shared one stays with the tenant that shared it: a removal never makes
a name refer to a version of another tenant. Functions take the session of their caller's transaction.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session, undefer

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.fields import Listed, Page, Reference
from app.limits.limit import Holder, Limit
from app.limits.tenant_budget import TenantBudget
from app.storage.tables import StoredNameRow, VersionRow

_ID_BYTES: Final = 12

T = TypeVar("T", bound=Listed)


class NameUsedError(Exception):
    """A version was to be the first of a name that its tenant has used before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of named things, as the API shows them.

    ``limit`` bounds the bytes of the kinds ``counted`` together; ``overhead_bytes`` are counted for each.
    """

    name: str
    plural: str
    prefix: str
    shown: type[T]
    listed: type[Page[T]]
    limit: Callable[[TenantBudget], Limit]
    counted: tuple[str, ...]
    overhead_bytes: int = 0

    def error(self, form: str, message: str, param: str | None = None) -> ApiError:
        """Return an error whose code is ``form`` with the kind's name in it: ``unknown_{}``."""
        return ApiError(ErrorCode(form.format(self.name)), message, param)

    def not_found(self, id_: str, param: str | None = None) -> ApiError:
        message = f"There is no {self.name} {clip(id_)!r}; GET /v1/{self.plural} lists them."
        return self.error("{}_not_found", message, param)

    def show(self, row: VersionRow, tenant: str) -> T:
        """Return a version as a tenant sees it."""
        return self.shown.model_validate(
            {
                **row.head, "id": row.id, "name": row.name, "version": row.version, "model": row.model,
                "shared": row.shared, "own": row.tenant == tenant, "sha256": row.sha256,
                "bytes": row.num_bytes, "created_at": row.created_at,
            }
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class NewVersion:
    """A version to be stored; ``head`` has the fields that describe it beside those of every kind.

    ``sha256`` and ``num_bytes`` are those of ``data`` unless most of it is a file; empty and 0 until they are
    known. With ``is_first`` it must be the first of its name.
    """

    name: str
    shared: bool
    head: Mapping[str, Any]
    data: bytes
    sha256: str = ""
    num_bytes: int = 0
    is_first: bool = False


def add(session: Session, kind: Kind[Any], new: NewVersion, tenant: str, model: str) -> VersionRow:
    """Store the next version of a name, whose ``sha256`` is known.

    Raises:
        ApiError: ``name_taken``: it is to be shared, and another tenant has shared one of that name.
        NameUsedError: It must be the first of its name, removed ones included, and is not.
    """
    if new.shared:
        _check_name(session, kind, tenant, new.name)
    name = session.get(StoredNameRow, (kind.name, tenant, new.name), with_for_update=True)
    if name is None:
        name = StoredNameRow(kind=kind.name, tenant=tenant, name=new.name, versions=0, shared=False)
        session.add(name)
    elif new.is_first:
        raise NameUsedError(new.name)
    name.versions += 1
    name.shared |= new.shared
    row = VersionRow(
        kind=kind.name, id=f"{kind.prefix}{secrets.token_hex(_ID_BYTES)}", tenant=tenant, name=new.name,
        version=name.versions, model=model, shared=new.shared, sha256=new.sha256,
        num_bytes=num_bytes_of(kind, new), created_at=time.time(), head=dict(new.head), data=new.data,
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row


def num_bytes_of(kind: Kind[Any], new: NewVersion) -> int:
    """Return the bytes that a version is counted with."""
    return (new.num_bytes or len(new.data)) + kind.overhead_bytes


def _check_name(session: Session, kind: Kind[Any], tenant: str, name: str) -> None:
    """Reject a name that would refer to versions of two tenants for all others, now or over time."""
    names = StoredNameRow
    sharing_tenants = select(names.tenant).where(
        names.kind == kind.name, names.name == name, names.shared.is_(True), names.tenant != tenant
    )
    if session.scalars(sharing_tenants.limit(1)).first() is not None:
        message = f"Another tenant has shared a {kind.name} {name!r}; share this one by another name."
        raise kind.error("{}_name_taken", message, "name")


def check_room(session: Session, kind: Kind[Any], limit: Limit, num_bytes: int, tenant: str) -> None:
    """Raise the limit's error if a tenant, or all together, may not store ``num_bytes`` more."""
    total = select(func.coalesce(func.sum(VersionRow.num_bytes), 0)).where(VersionRow.kind.in_(kind.counted))

    def stored(tenant: str) -> int:
        wanted = total.where(VersionRow.tenant == tenant) if tenant else total
        return int(session.scalar(wanted) or 0)

    limit.check(tenant, num_bytes, stored)


def used_bytes(session: Session, kind: Kind[Any]) -> dict[Holder, int]:
    row = VersionRow
    query = select(row.tenant, func.sum(row.num_bytes)).where(row.kind == kind.name).group_by(row.tenant)
    return {Holder(tenant): int(num_bytes or 0) for tenant, num_bytes in session.execute(query).all()}


def page(
    session: Session, kind: Kind[Any], tenant: str, *, name: str | None, after: str | None, limit: int
) -> Sequence[VersionRow]:
    """Return a tenant's rows and shared ones, newest first; ``not_found`` for an invisible ``after``."""
    conditions = _visible_to(kind, tenant)
    if name is not None:
        conditions.append(VersionRow.name == name)
    if after is not None:
        conditions.append(VersionRow.number < visible(session, kind, after, tenant, param="after").number)
    newest_first = select(VersionRow).where(*conditions).order_by(VersionRow.number.desc())
    return session.scalars(newest_first.limit(limit)).all()


def visible(
    session: Session,
    kind: Kind[Any],
    id_: str,
    tenant: str,
    *,
    param: str | None = None,
    with_data: bool = False,
) -> VersionRow:
    """Return the version of an id; ``not_found`` if there is none that the tenant sees."""
    row = _of_id(session, kind, id_, tenant, with_data=with_data)
    if row is None:
        raise kind.not_found(id_, param)
    return row


def _of_id(
    session: Session, kind: Kind[Any], id_: str, tenant: str, *, with_data: bool = False
) -> VersionRow | None:
    # A database may refuse to compare text that cannot be an id.
    if not re.fullmatch(rf"{kind.prefix}[0-9a-f]{{{2 * _ID_BYTES}}}", id_):
        return None
    query = select(VersionRow).where(VersionRow.id == id_, *_visible_to(kind, tenant))
    return session.scalars(query.options(undefer(VersionRow.data)) if with_data else query).first()


def named(
    session: Session, kind: Kind[Any], text: str, id_: str | None, tenant: str, models: Sequence[str]
) -> VersionRow | None:
    """Return what a name with or without a version means; with an id, the one of this id and name."""
    reference = Reference.parse(text)
    if reference is None:
        return None
    if id_ is None:
        return resolve(session, kind, reference, tenant, models)
    row = _of_id(session, kind, id_, tenant)
    if row is None or reference not in {Reference(row.name), Reference(row.name, row.version)}:
        return None
    return row


def resolve(
    session: Session,
    kind: Kind[Any],
    reference: Reference,
    tenant: str,
    models: Sequence[str],
    *,
    with_data: bool = False,
) -> VersionRow | None:
    """Resolve a name for a tenant: to its own versions if it ever had one, otherwise to shared ones.

    One for another model than ``models`` is returned only if there is none for this one.
    """
    rows = VersionRow
    is_own = session.get(StoredNameRow, (kind.name, tenant, reference.name)) is not None
    of_whom = rows.tenant == tenant if is_own else rows.shared.is_(True)
    conditions = [rows.kind == kind.name, rows.name == reference.name, of_whom]
    if reference.version is not None:
        conditions.append(rows.version == reference.version)
    best_first = rows.model.in_(models).desc(), rows.version.desc()
    query = select(rows).where(*conditions).order_by(*best_first).limit(1)
    return session.scalars(query.options(undefer(rows.data)) if with_data else query).first()


def data(session: Session, number: int) -> bytes | None:
    content = session.scalar(select(VersionRow.data).where(VersionRow.number == number))
    return None if content is None else bytes(content)


def num_uses(session: Session, kind: Kind[Any], sha256: str) -> int:
    query = select(func.count()).where(VersionRow.kind == kind.name, VersionRow.sha256 == sha256)
    return int(session.scalar(query) or 0)


def newest(
    session: Session, kind: Kind[Any], tenant: str, models: Sequence[str], limit: int
) -> list[VersionRow]:
    """Return the version that each name means; ``limit`` is the number of newest ones looked at."""
    rows, names = VersionRow, StoredNameRow
    visible_rows = (
        select(rows).where(*_visible_to(kind, tenant), rows.model.in_(models)).order_by(rows.number.desc())
    )
    of_tenant = select(names.name).where(names.kind == kind.name, names.tenant == tenant)
    own_names, newest_by_name = set(session.scalars(of_tenant)), dict[str, VersionRow]()
    for row in session.scalars(visible_rows.limit(limit)):
        # A name that the tenant has used never means a shared version of another one.
        if (row.tenant == tenant) == (row.name in own_names):
            newest_by_name.setdefault(row.name, row)
    return list(newest_by_name.values())


def _visible_to(kind: Kind[Any], tenant: str) -> list[ColumnElement[bool]]:
    return [VersionRow.kind == kind.name, or_(VersionRow.tenant == tenant, VersionRow.shared.is_(True))]
