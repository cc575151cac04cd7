"""Presets in the database; names, versions and visibility are those of ``versions``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy.orm import Session

from api_schemas.errors import ErrorCode
from api_schemas.names import Reference
from api_schemas.presets import Preset, PresetContent
from app.allowance import Allowance
from app.storage.database import Database
from app.storage.storage_usage import Holder
from app.storage.tables import PresetNameRow, PresetRow
from app.storage.versions import VersionTable, write_version

OVERHEAD_BYTES: Final = 1024
"""Bytes that each preset is counted with beside its operations, which bounds their number."""

_TABLE: Final = VersionTable(
    PresetNameRow,
    PresetRow,
    kind="preset",
    plural="presets",
    prefix="pre_",
    not_found=ErrorCode.PRESET_NOT_FOUND,
    name_taken=ErrorCode.PRESET_NAME_TAKEN,
)


@dataclasses.dataclass(frozen=True, slots=True)
class NewRow:
    """A preset to be stored.

    Attributes:
        tenant: The tenant.
        name: The name.
        description: Its purpose.
        model: The server's name of the model.
        shared: Whether every tenant may use it.
        interventions: Its operations as in a request.
    """

    tenant: str
    name: str
    description: str
    model: str
    shared: bool
    interventions: Sequence[dict[str, Any]]

    @property
    def data(self) -> bytes:
        """The operations as ASCII JSON, which preserves any text."""
        return json.dumps(self.interventions, separators=(",", ":")).encode("ascii")

    @property
    def sha256(self) -> str:
        """The SHA-256 of ``data``, hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()


class PresetStore:
    """Presets of all tenants.

    Args:
        database: The database with the tables, started before the store is used.
        allowance: The bytes that all presets, and those of one tenant, may have.
    """

    def __init__(self, database: Database, allowance: Allowance) -> None:
        self._database = database
        self._allowance = allowance

    async def add(self, new: NewRow) -> PresetContent:
        """Store a preset as the next version of its name, and return it.

        Raises:
            ApiError: ``preset_store_full``; ``preset_name_taken``: another tenant has shared one of that
                name.
        """

        def write(session: Session) -> PresetContent:
            num_bytes = len(data) + OVERHEAD_BYTES
            _TABLE.check_room(session, self._allowance, num_bytes, new.tenant)
            version = _TABLE.next_version(session, new.tenant, new.name, shared=new.shared)
            row = PresetRow(
                id=preset_id, tenant=new.tenant, name=new.name, version=version, model=new.model,
                shared=new.shared, sha256=sha256, num_bytes=num_bytes, created_at=time.time(), data=data,
                description=new.description, operations=operations,
            )  # fmt: skip
            session.add(row)
            return _content(row, new.tenant)

        data, sha256, preset_id = new.data, new.sha256, _TABLE.new_id()
        operations = list(dict.fromkeys(one["op"] for one in new.interventions))
        return await write_version(self._database, write)

    async def newest_if_same(self, new: NewRow) -> PresetContent | None:
        """Return the newest version of the tenant's name, if it is the same as a preset to be stored."""

        def read(session: Session) -> PresetContent | None:
            row = _TABLE.find(session, Reference(new.name), new.tenant, [new.model])
            return None if row is None or not _is_same(row, new) else _content(row, new.tenant)

        return await self._database.read(read)

    async def page(
        self, tenant: str, *, name: str | None, after: str | None, limit: int
    ) -> tuple[list[Preset], bool]:
        """Return a tenant's presets and shared ones, newest first, and whether there are more.

        Raises:
            ApiError: ``preset_not_found``: no preset visible to the tenant has the id ``after``.
        """

        def read(session: Session) -> list[Preset]:
            rows = _TABLE.page(session, tenant, name=name, after=after, limit=limit + 1)
            return [Preset.model_validate(_values(row, tenant)) for row in rows]

        found = await self._database.read(read)
        return found[:limit], len(found) > limit

    async def find(
        self, references: Collection[Reference], tenant: str, models: Sequence[str]
    ) -> dict[Reference, PresetContent]:
        """Resolve names for a tenant, see ``VersionTable.find``; those that mean nothing are left out."""

        def read(session: Session) -> dict[Reference, PresetContent]:
            rows = {one: _TABLE.find(session, one, tenant, models) for one in references}
            return {one: _content(row, tenant) for one, row in rows.items() if row is not None}

        return await self._database.read(read)

    async def newest(self, tenant: str, models: Sequence[str], limit: int) -> list[Preset]:
        """Return what each name means that a tenant can use with a model, see ``VersionTable.newest``."""

        def read(session: Session) -> list[Preset]:
            rows = _TABLE.newest(session, tenant, models, limit)
            return [Preset.model_validate(_values(row, tenant)) for row in rows]

        return await self._database.read(read)

    async def remove(self, preset_id: str, tenant: str) -> None:
        """Remove a preset visible to a tenant; the caller checks the permission to remove it.

        Raises:
            ApiError: ``preset_not_found``.
        """
        await self._database.write(lambda session: session.delete(_TABLE.row(session, preset_id, tenant)))

    async def used_bytes(self) -> dict[Holder, int]:
        """Return the bytes of all presets by holder."""
        return await self._database.read(_TABLE.used_bytes)


def _values(row: PresetRow, tenant: str) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "version": row.version,
        "description": row.description,
        "model": row.model,
        "operations": row.operations,
        "shared": row.shared,
        "own": row.tenant == tenant,
        "sha256": row.sha256,
        "bytes": row.num_bytes,
        "created_at": row.created_at,
    }


def _content(row: PresetRow, tenant: str) -> PresetContent:
    values = {**_values(row, tenant), "interventions": json.loads(row.data)}
    return PresetContent.model_construct(**values)


def _is_same(row: PresetRow, new: NewRow) -> bool:
    wanted = (new.tenant, new.model, new.description, new.shared, new.sha256)
    return (row.tenant, row.model, row.description, row.shared, row.sha256) == wanted


__all__ = ["OVERHEAD_BYTES", "NewRow", "PresetStore"]
