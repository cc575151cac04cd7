from __future__ import annotations

import numpy as np
import safetensors.numpy
from starlette.requests import Request

from api_schemas.errors import ErrorCode
from api_schemas.vectors import Training, Vector, VectorList
from app.auth.principal import Principal
from app.body import BodyLimits
from app.engine.client import EngineClient
from app.settings import Settings
from app.storage.database import Database
from app.storage.storage_usage import StoredBytes
from app.storage.vector_rows import VectorRows
from app.storage.vectors import NewRow, VectorStore
from app.tenant_budget import TenantBudget
from app.vectors.files import provenance_of
from app.vectors.names import NameResolver
from app.vectors.rows import ModelShape
from app.vectors.uploads import read_upload
from app.version_cache import VersionCache
from app.version_service import VersionService, check_sharing


class VectorService(VersionService[VectorStore]):
    """``cache`` has the numbers of detectors too."""

    def __init__(
        self, settings: Settings, database: Database, engine: EngineClient, stored: StoredBytes
    ) -> None:
        super().__init__(VectorStore(database, TenantBudget.of(settings).vector_bytes), stored)
        self._settings = settings
        self.cache = VersionCache(settings.vector_cache_bytes)
        self._engine = engine

    @property
    def shape(self) -> ModelShape:
        """The shape that vectors of the served model must have; only when the engine is ready."""
        return ModelShape.of(self._engine.served().names[0], self._engine.capabilities())

    async def create(self, request: Request, caller: Principal, *, strict: bool = False) -> Vector:
        """Store the vector of a request, or nothing if it is invalid (ApiError).

        ``strict`` refuses a file that names another model than the served one.
        """
        settings = self._settings
        limits = BodyLimits(settings.max_body_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
        upload = await read_upload(request, self.shape, limits)
        refused = ErrorCode.VECTOR_MISMATCH if strict else None
        warnings = self._engine.served().warnings_of(upload.model, "The metadata of the file", refused)
        if upload.has_other_training:
            warnings.append("The file's training is not of its numbers, and was left out.")
        kept = await self.keep(
            upload.rows,
            caller,
            name=upload.name,
            shared=upload.shared,
            format_=upload.format,
            sha256=upload.sha256,
            training=upload.training,
        )
        return kept.model_copy(update={"warnings": warnings})

    async def keep(
        self,
        rows: VectorRows,
        caller: Principal,
        *,
        name: str,
        shared: bool,
        format_: str,
        sha256: str | None = None,
        training: Training | None = None,
    ) -> Vector:
        """Store the next version of a name; raises ApiError ``missing_scope``, ``stored_bytes_full``."""
        check_sharing(caller, shared=shared)
        new = NewRow(caller.tenant, name, self.shape.name, rows, shared, format_, sha256, training)
        return await self._add(caller.tenant, len(rows.data), lambda: self._store.add(new))

    async def add_first(self, name: str, rows: VectorRows, training: Training, caller: Principal) -> Vector:
        """Store a trained, shared vector; raises NameUsedError if it is not the first of its name."""
        check_sharing(caller, shared=True)
        new = NewRow(
            caller.tenant, name, self.shape.name, rows, shared=True, format="trained", training=training,
            is_first=True,
        )  # fmt: skip
        return await self._add(caller.tenant, len(rows.data), lambda: self._store.add(new))

    async def page(self, tenant: str, *, name: str | None, after: str | None, limit: int) -> VectorList:
        """Include shared vectors; raises ApiError ``vector_not_found``."""
        data, has_more = await self._store.page(tenant, name=name, after=after, limit=limit)
        return VectorList.of(data, has_more=has_more)

    async def get(self, vector_id: str, tenant: str) -> Vector:
        """Return a vector that is visible to a tenant; raises ApiError ``vector_not_found``."""
        return await self._store.get(vector_id, tenant)

    async def content(self, vector_id: str, tenant: str) -> bytes:
        """Return a vector as a safetensors file; raises ApiError ``vector_not_found``."""
        vector, data = await self._store.content(vector_id, tenant)
        rows = np.frombuffer(data, "<f4").reshape(len(vector.layers), vector.width)
        tensors = {
            vector.at.replace("*", str(layer)): row for layer, row in zip(vector.layers, rows, strict=True)
        }
        return safetensors.numpy.save(tensors, provenance_of(vector))

    async def remove(self, vector_id: str, caller: Principal) -> None:
        """Raise ApiError ``vector_not_found``; ``missing_scope``: a shared one needs ``admin``."""
        vector = await self._store.get(vector_id, caller.tenant)
        await self._remove(vector_id, caller, shared=vector.shared, own=vector.own)

    def resolver(self, tenant: str) -> NameResolver:
        models = self._engine.served().names
        return NameResolver(self._store, self.cache, self.shape, models, tenant)


__all__ = ["VectorService"]
