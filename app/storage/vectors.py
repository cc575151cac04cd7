"""Vectors in the database: created, found by id or by name, removed.

The numbers are stored in the database too, a few megabytes at most, so that every server that shares the
database sees each vector at once. A tenant sees its own vectors and shared ones. A version never changes, and
its number is never reused. A name that a tenant has used stays its own even after its vectors are removed,
and a name that was shared stays with the tenant that shared it: a removal never makes a name refer to another
tenant's numbers.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from api_schemas.vectors import Training, Vector
from app.allowance import Allowance
from app.storage.database import Database
from app.storage.storage_usage import Holder
from app.storage.tables import VectorNameRow, VectorRow
from app.storage.vector_rows import VectorRows, kind_of

_ID_BYTES: Final = 12
_ID_PREFIX: Final = "vec_"
_ID: Final = re.compile(rf"{_ID_PREFIX}[0-9a-f]{{{2 * _ID_BYTES}}}")


@dataclasses.dataclass(frozen=True, slots=True)
class NewRow:
    """A vector to be stored.

    Attributes:
        tenant: The tenant.
        name: The name that operations refer to.
        model: The server's name of the model.
        rows: The numbers.
        shared: Whether every tenant may use it.
        format: The format in which it was received.
        source_sha256: The SHA-256 of the uploaded file.
        training: How it was trained.
    """

    tenant: str
    name: str
    model: str
    rows: VectorRows
    shared: bool
    format: str
    source_sha256: str | None = None
    training: Training | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class FoundVector:
    """A vector's metadata for operations, without its numbers.

    Attributes:
        number: The argument of ``VectorStore.data``.
        id: Its id.
        name: Its name.
        version: Its version.
        model: The model that it belongs to.
        leaf: The kind of points that it applies to.
        layers: The layers of its rows, ascending.
        width: The length of a row.
    """

    number: int
    id: str
    name: str
    version: int
    model: str
    leaf: str
    layers: tuple[int, ...]
    width: int


class VectorStore:
    """Vectors of all tenants.

    Args:
        database: The database with the tables, started before the store is used.
        allowance: The bytes that all vectors, and those of one tenant, may have.
    """

    def __init__(self, database: Database, allowance: Allowance) -> None:
        self._database = database
        self._allowance = allowance

    async def add(self, new: NewRow) -> Vector:
        """Store a vector as the next version of its name.

        Raises:
            ApiError: ``vector_store_full``; ``vector_name_taken``: another tenant has shared one of that
                name.
        """

        def write(session: Session) -> Vector:
            self._check_room(session, len(data), new.tenant)
            if new.shared:
                _check_name(session, new)
            row = VectorRow(
                id=vector_id, tenant=new.tenant, name=new.name, version=_next_version(session, new),
                model=new.model, leaf=new.rows.leaf, layers=list(new.rows.layers), width=new.rows.width,
                shared=new.shared, format=new.format, source_sha256=new.source_sha256, sha256=sha256,
                num_bytes=len(data), created_at=time.time(), training=training, data=data,
            )  # fmt: skip
            session.add(row)
            return vector_from_row(row, new.tenant)

        data, sha256 = new.rows.data, new.rows.sha256
        training = None if new.training is None else new.training.model_dump(mode="json")
        vector_id = f"{_ID_PREFIX}{secrets.token_hex(_ID_BYTES)}"
        try:
            return await self._database.write(write)
        except IntegrityError:
            # The same name was created concurrently, on a database with concurrent writers.
            return await self._database.write(write)

    async def page(
        self, tenant: str, *, name: str | None, after: str | None, limit: int
    ) -> tuple[list[Vector], bool]:
        """Return a tenant's vectors and shared ones, newest first, and whether there are more.

        Raises:
            ApiError: ``vector_not_found``: no vector visible to the tenant has the id ``after``.
        """

        def read(session: Session) -> list[Vector]:
            wanted: list[ColumnElement[bool]] = [_seen_by(tenant)]
            if name is not None:
                wanted.append(VectorRow.name == name)
            if after is not None:
                wanted.append(VectorRow.number < _row(session, after, tenant, "after").number)
            newest_first = select(VectorRow).where(*wanted).order_by(VectorRow.number.desc())
            return [vector_from_row(row, tenant) for row in session.scalars(newest_first.limit(limit + 1))]

        found = await self._database.read(read)
        return found[:limit], len(found) > limit

    async def get(self, vector_id: str, tenant: str) -> Vector:
        """Return a vector visible to a tenant; raise ApiError ``vector_not_found``."""
        return await self._database.read(
            lambda session: vector_from_row(_row(session, vector_id, tenant), tenant)
        )

    async def content(self, vector_id: str, tenant: str) -> tuple[Vector, bytes]:
        """Return a vector visible to a tenant, and its numbers; raise ApiError ``vector_not_found``."""

        def read(session: Session) -> tuple[Vector, bytes]:
            row = _row(session, vector_id, tenant)
            return vector_from_row(row, tenant), bytes(row.data)

        return await self._database.read(read)

    async def remove(self, vector_id: str, tenant: str) -> None:
        """Remove a vector visible to a tenant; the caller checks the permission to remove it.

        Raises:
            ApiError: ``vector_not_found``.
        """
        await self._database.write(lambda session: session.delete(_row(session, vector_id, tenant)))

    async def find(
        self, name: str, version: int | None, tenant: str, models: Sequence[str]
    ) -> FoundVector | None:
        """Resolve a name for a tenant: to its own vector if it ever had one, otherwise to a shared one.

        Args:
            name: The name.
            version: The version, or None for the newest.
            tenant: The tenant whose operations use the name.
            models: Names of the served model; a vector of another model is returned only if there is none of
                this one.
        """

        def read(session: Session) -> FoundVector | None:
            is_own = session.get(VectorNameRow, (tenant, name)) is not None
            of_whom = VectorRow.tenant == tenant if is_own else VectorRow.shared.is_(True)
            wanted = [VectorRow.name == name, of_whom]
            if version is not None:
                wanted.append(VectorRow.version == version)
            best_first = VectorRow.model.in_(models).desc(), VectorRow.version.desc()
            row = session.scalars(select(VectorRow).where(*wanted).order_by(*best_first).limit(1)).first()
            return None if row is None else _found(row)

        return await self._database.read(read)

    async def data(self, number: int) -> bytes | None:
        """Return a vector's numbers, or None if it was removed."""
        found = await self._database.read(
            lambda session: session.scalar(select(VectorRow.data).where(VectorRow.number == number))
        )
        return None if found is None else bytes(found)

    async def used_bytes(self) -> dict[Holder, int]:
        """Return the bytes of all vectors by holder."""
        wanted = select(VectorRow.tenant, func.sum(VectorRow.num_bytes)).group_by(VectorRow.tenant)
        rows = await self._database.read(lambda session: session.execute(wanted).all())
        return {Holder(tenant): int(num_bytes or 0) for tenant, num_bytes in rows}

    def _check_room(self, session: Session, num_bytes: int, tenant: str) -> None:
        stored = select(func.coalesce(func.sum(VectorRow.num_bytes), 0))
        self._allowance.check_total(int(session.scalar(stored) or 0), num_bytes)
        if tenant:
            own = session.scalar(stored.where(VectorRow.tenant == tenant))
            self._allowance.check(tenant, int(own or 0), num_bytes)


def vector_from_row(row: VectorRow, tenant: str) -> Vector:
    """Return a vector's properties for a tenant."""
    values: dict[str, Any] = {
        "id": row.id,
        "name": row.name,
        "version": row.version,
        "model": row.model,
        "at": kind_of(row.leaf),
        "layers": row.layers,
        "width": row.width,
        "shared": row.shared,
        "own": row.tenant == tenant,
        "format": row.format,
        "source_sha256": row.source_sha256,
        "sha256": row.sha256,
        "bytes": row.num_bytes,
        "created_at": row.created_at,
        "training": row.training,
    }
    return Vector.model_validate(values)


def _found(row: VectorRow) -> FoundVector:
    return FoundVector(
        row.number, row.id, row.name, row.version, row.model, row.leaf, tuple(row.layers), row.width
    )


def _seen_by(tenant: str) -> ColumnElement[bool]:
    return or_(VectorRow.tenant == tenant, VectorRow.shared.is_(True))


def _row(session: Session, vector_id: str, tenant: str, param: str | None = None) -> VectorRow:
    wanted = select(VectorRow).where(VectorRow.id == vector_id, _seen_by(tenant))
    # A database may refuse to compare text that cannot be an id.
    row = session.scalars(wanted).first() if _ID.fullmatch(vector_id) else None
    if row is None:
        message = f"There is no vector {clip(vector_id)!r}; GET /v1/vectors lists them."
        raise ApiError(ErrorCode.VECTOR_NOT_FOUND, message, param)
    return row


def _check_name(session: Session, new: NewRow) -> None:
    """Reject a name that would refer to vectors of two tenants for all others, now or over time."""
    others = select(VectorNameRow.tenant).where(
        VectorNameRow.name == new.name, VectorNameRow.shared.is_(True), VectorNameRow.tenant != new.tenant
    )
    if session.scalars(others.limit(1)).first() is not None:
        raise ApiError(
            ErrorCode.VECTOR_NAME_TAKEN,
            f"Another tenant has shared a vector {new.name!r}; share this one by another name.",
            "name",
        )


def _next_version(session: Session, new: NewRow) -> int:
    name = session.get(VectorNameRow, (new.tenant, new.name), with_for_update=True)
    if name is None:
        name = VectorNameRow(tenant=new.tenant, name=new.name, versions=0, shared=False)
        session.add(name)
    name.versions += 1
    name.shared |= new.shared
    return name.versions


__all__ = ["FoundVector", "NewRow", "VectorStore"]
