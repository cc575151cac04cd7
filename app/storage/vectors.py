"""Vectors in the database, with their numbers: all servers that share it see each vector at once."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy.orm import Session

from api_schemas.errors import ErrorCode
from api_schemas.vectors import Training, Vector
from app.limits.allowances import Allowance
from app.storage.database import Database
from app.storage.tables import DetectorRow, VectorNameRow, VectorRow
from app.storage.versions import NewVersion, VersionStore, VersionTable

Floats = npt.NDArray[np.float32]

LAYER_PREFIX: Final = "layers.*."


@dataclasses.dataclass(frozen=True, slots=True)
class VectorRows:
    """The values of a stored vector, ``[layers, width]``; ``leaf`` is such as ``output`` of a layer."""

    leaf: str
    layers: tuple[int, ...]
    values: Floats

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    @property
    def data(self) -> bytes:
        """The values, rows by layer, float32 and little-endian."""
        return np.ascontiguousarray(self.values, "<f4").tobytes()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def kind_of(leaf: str) -> str:
    return f"{LAYER_PREFIX}{leaf}"


_TABLE: Final = VersionTable(
    VectorNameRow,
    VectorRow,
    kind="vector",
    plural="vectors",
    prefix="vec_",
    not_found=ErrorCode.VECTOR_NOT_FOUND,
    name_taken=ErrorCode.VECTOR_NAME_TAKEN,
    beside=(DetectorRow,),
)


@dataclasses.dataclass(frozen=True, slots=True)
class NewRow:
    """A vector to be stored; ``source_sha256`` is that of the uploaded file."""

    tenant: str
    name: str
    model: str
    rows: VectorRows
    shared: bool
    format: str
    source_sha256: str | None = None
    training: Training | None = None
    is_first: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class FoundVector:
    """A vector's metadata for operations; ``number`` is the argument of ``VectorStore.data``."""

    number: int
    id: str
    name: str
    version: int
    model: str
    leaf: str
    layers: tuple[int, ...]
    width: int
    shared: bool


class VectorStore(VersionStore[VectorRow, Vector]):
    """Vectors of all tenants; ``allowance`` counts vectors and detectors together."""

    def __init__(self, database: Database, allowance: Allowance) -> None:
        super().__init__(database, allowance, _TABLE, vector_from_row)

    async def add(self, new: NewRow) -> Vector:
        """Store the next version of a name; ``vector_store_full``, ``vector_name_taken``, NameUsedError."""
        rows = new.rows
        return await self.insert(
            NewVersion(new.tenant, new.name, new.model, new.shared, rows.data, new.is_first),
            leaf=rows.leaf,
            layers=list(rows.layers),
            width=rows.width,
            format=new.format,
            source_sha256=new.source_sha256,
            training=None if new.training is None else new.training.model_dump(mode="json"),
        )

    async def find(
        self, text: str, id_: str | None, tenant: str, models: Sequence[str]
    ) -> FoundVector | None:
        def read(session: Session) -> FoundVector | None:
            row = self._named(session, text, id_, tenant, models)
            return None if row is None else _found(row)

        return await self._database.read(read)


def vector_from_row(row: VectorRow, tenant: str) -> Vector:
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
        row.number, row.id, row.name, row.version, row.model, row.leaf, tuple(row.layers),
        row.width, row.shared,
    )  # fmt: skip
