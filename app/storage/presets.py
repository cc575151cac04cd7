from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy.orm import Session

from api_schemas.errors import ErrorCode
from api_schemas.fields import Reference
from api_schemas.presets import Preset, PresetContent
from app.limits.allowances import Allowance
from app.storage.database import Database
from app.storage.tables import PresetNameRow, PresetRow
from app.storage.versions import NewVersion, VersionStore, VersionTable

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
    """A preset to be stored; ``interventions`` are operations as in a request."""

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
        return hashlib.sha256(self.data).hexdigest()


class PresetStore(VersionStore[PresetRow, Preset]):
    def __init__(self, database: Database, allowance: Allowance) -> None:
        super().__init__(database, allowance, _TABLE, _shown)

    async def add(self, new: NewRow) -> PresetContent:
        """Store the next version of a name; ``preset_store_full``, ``preset_name_taken``."""
        added = await self.insert(
            NewVersion(new.tenant, new.name, new.model, new.shared, new.data),
            OVERHEAD_BYTES,
            description=new.description,
            operations=list(dict.fromkeys(one["op"] for one in new.interventions)),
        )
        return PresetContent.model_construct(**added.model_dump(), interventions=json.loads(new.data))

    async def newest_if_same(self, new: NewRow) -> PresetContent | None:
        """Return the newest version of the tenant's name, if it is the same as a preset to be stored."""

        def read(session: Session) -> PresetContent | None:
            row = _TABLE.find(session, Reference(new.name), new.tenant, [new.model])
            return None if row is None or not _is_same(row, new) else _content(row, new.tenant)

        return await self._database.read(read)

    async def find(
        self, references: Collection[Reference], tenant: str, models: Sequence[str]
    ) -> dict[Reference, PresetContent]:
        def read(session: Session) -> dict[Reference, PresetContent]:
            rows = {one: _TABLE.find(session, one, tenant, models) for one in references}
            return {one: _content(row, tenant) for one, row in rows.items() if row is not None}

        return await self._database.read(read)

    async def newest(self, tenant: str, models: Sequence[str], limit: int) -> list[Preset]:
        def read(session: Session) -> list[Preset]:
            rows = _TABLE.newest(session, tenant, models, limit)
            return [_shown(row, tenant) for row in rows]

        return await self._database.read(read)


def _shown(row: PresetRow, tenant: str) -> Preset:
    return Preset.model_validate(_values(row, tenant))


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
