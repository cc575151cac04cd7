from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy.orm import Session

from api_schemas.detectors import Detector, DetectorTraining, DetectorUsed
from api_schemas.errors import ErrorCode
from app.limits.allowances import Allowance
from app.storage.database import Database
from app.storage.tables import DetectorNameRow, DetectorRow, VectorRow
from app.storage.versions import NewVersion, VersionStore, VersionTable

_TABLE: Final = VersionTable(
    DetectorNameRow,
    DetectorRow,
    kind="detector",
    plural="detectors",
    prefix="det_",
    not_found=ErrorCode.DETECTOR_NOT_FOUND,
    name_taken=ErrorCode.DETECTOR_NAME_TAKEN,
    beside=(VectorRow,),
)


@dataclasses.dataclass(frozen=True, slots=True)
class FoundDetector:
    """A detector that a request names; ``number`` is the argument of ``DetectorStore.data``."""

    number: int
    id: str
    name: str
    version: int
    model: str
    shared: bool

    @property
    def used(self) -> DetectorUsed:
        return DetectorUsed(name=self.name, version=self.version, id=self.id)


class DetectorStore(VersionStore[DetectorRow, Detector]):
    """Detectors of all tenants; ``allowance`` counts vectors and detectors together."""

    def __init__(self, database: Database, allowance: Allowance) -> None:
        super().__init__(database, allowance, _TABLE, _shown)

    async def add(
        self,
        new: NewVersion,
        head: dict[str, Any],
        format_: str,
        source_sha256: str | None,
        training: DetectorTraining | None,
    ) -> Detector:
        """Store the next version of a name; ``vector_store_full``, ``detector_name_taken``."""
        return await self.insert(
            new,
            head=head,
            format=format_,
            source_sha256=source_sha256,
            training=None if training is None else training.model_dump(mode="json"),
        )

    async def find(
        self, text: str, id_: str | None, tenant: str, models: Sequence[str]
    ) -> FoundDetector | None:
        def read(session: Session) -> FoundDetector | None:
            row = self._named(session, text, id_, tenant, models)
            if row is None:
                return None
            return FoundDetector(row.number, row.id, row.name, row.version, row.model, row.shared)

        return await self._database.read(read)


def _shown(row: DetectorRow, tenant: str) -> Detector:
    values: dict[str, Any] = {
        **row.head,
        "id": row.id,
        "name": row.name,
        "version": row.version,
        "model": row.model,
        "shared": row.shared,
        "own": row.tenant == tenant,
        "format": row.format,
        "source_sha256": row.source_sha256,
        "sha256": row.sha256,
        "bytes": row.num_bytes,
        "created_at": row.created_at,
        "training": row.training,
    }
    return Detector.model_validate(values)
