"""Vectors in the database: created, found by id or by name, removed.

The numbers are stored in the database too, a few megabytes at most, so that every server that shares the
database sees each vector at once. Names, versions and visibility are those of ``versions``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from api_schemas.errors import ErrorCode
from api_schemas.names import Reference
from api_schemas.vectors import Training, Vector
from app.allowance import Allowance
from app.storage.database import Database
from app.storage.storage_usage import Holder
from app.storage.tables import VectorNameRow, VectorRow
from app.storage.vector_rows import VectorRows, kind_of
from app.storage.versions import VersionTable, write_version

_TABLE: Final = VersionTable(
    VectorNameRow,
    VectorRow,
    kind="vector",
    plural="vectors",
    prefix="vec_",
    not_found=ErrorCode.VECTOR_NOT_FOUND,
    name_taken=ErrorCode.VECTOR_NAME_TAKEN,
)


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
            _TABLE.check_room(session, self._allowance, len(data), new.tenant)
            version = _TABLE.next_version(session, new.tenant, new.name, shared=new.shared)
            row = VectorRow(
                id=vector_id, tenant=new.tenant, name=new.name, version=version,
                model=new.model, leaf=new.rows.leaf, layers=list(new.rows.layers), width=new.rows.width,
                shared=new.shared, format=new.format, source_sha256=new.source_sha256, sha256=sha256,
                num_bytes=len(data), created_at=time.time(), training=training, data=data,
            )  # fmt: skip
            session.add(row)
            return vector_from_row(row, new.tenant)

        data, sha256 = new.rows.data, new.rows.sha256
        training = None if new.training is None else new.training.model_dump(mode="json")
        vector_id = _TABLE.new_id()
        return await write_version(self._database, write)

    async def page(
        self, tenant: str, *, name: str | None, after: str | None, limit: int
    ) -> tuple[list[Vector], bool]:
        """Return a tenant's vectors and shared ones, newest first, and whether there are more.

        Raises:
            ApiError: ``vector_not_found``: no vector visible to the tenant has the id ``after``.
        """

        def read(session: Session) -> list[Vector]:
            rows = _TABLE.page(session, tenant, name=name, after=after, limit=limit + 1)
            return [vector_from_row(row, tenant) for row in rows]

        found = await self._database.read(read)
        return found[:limit], len(found) > limit

    async def get(self, vector_id: str, tenant: str) -> Vector:
        """Return a vector visible to a tenant; raise ApiError ``vector_not_found``."""
        return await self._database.read(
            lambda session: vector_from_row(_TABLE.row(session, vector_id, tenant), tenant)
        )

    async def content(self, vector_id: str, tenant: str) -> tuple[Vector, bytes]:
        """Return a vector visible to a tenant, and its numbers; raise ApiError ``vector_not_found``."""

        def read(session: Session) -> tuple[Vector, bytes]:
            row = _TABLE.row(session, vector_id, tenant)
            return vector_from_row(row, tenant), bytes(row.data)

        return await self._database.read(read)

    async def remove(self, vector_id: str, tenant: str) -> None:
        """Remove a vector visible to a tenant; the caller checks the permission to remove it.

        Raises:
            ApiError: ``vector_not_found``.
        """
        await self._database.write(lambda session: session.delete(_TABLE.row(session, vector_id, tenant)))

    async def find(self, reference: Reference, tenant: str, models: Sequence[str]) -> FoundVector | None:
        """Resolve a name for a tenant, see ``VersionTable.find``."""

        def read(session: Session) -> FoundVector | None:
            row = _TABLE.find(session, reference, tenant, models)
            return None if row is None else _found(row)

        return await self._database.read(read)

    async def find_id(self, vector_id: str, tenant: str) -> FoundVector | None:
        """Return the vector with an id, if it is visible to a tenant."""

        def read(session: Session) -> FoundVector | None:
            row = _TABLE.get(session, vector_id, tenant)
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
        return await self._database.read(_TABLE.used_bytes)


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


__all__ = ["FoundVector", "NewRow", "VectorStore"]
