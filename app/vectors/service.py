"""The vectors of one server: storage, lookup, and resolution of their names in requests.

``create_app`` creates the one service; the routes below ``/v1/vectors`` and every request whose operations
name a vector use it.
"""

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
    """The vectors of one server.

    Args:
        settings: The server's.
        database: Stores the vectors; started before this is used.
        engine: Serves the model that the vectors must fit.
        stored: The bytes stored by tenants, here and elsewhere.

    Attributes:
        cache: The numbers used last, also of detectors.
    """

    def __init__(
        self, settings: Settings, database: Database, engine: EngineClient, stored: StoredBytes
    ) -> None:
        """Create the parts; nothing is read yet."""
        super().__init__(VectorStore(database, TenantBudget.of(settings).vector_bytes), stored)
        self._settings = settings
        self.cache = VersionCache(settings.vector_cache_bytes)
        self._engine = engine

    @property
    def shape(self) -> ModelShape:
        """The shape that vectors of the served model must have; only when the engine is ready."""
        return ModelShape.of(self._engine.served().names[0], self._engine.capabilities())

    async def create(self, request: Request, caller: Principal, *, strict: bool = False) -> Vector:
        """Read the vector of a request and store it.

        Args:
            request: The request.
            caller: Its sender.
            strict: Whether to refuse a file that names another model than the served one.

        Raises:
            ApiError: The vector is invalid or exceeds a limit; nothing is stored then.
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
        """Store a vector as the next version of its name.

        Raises:
            ApiError: ``missing_scope``, ``stored_bytes_full``, and the errors of ``VectorStore.add``.
        """
        check_sharing(caller, shared=shared)
        new = NewRow(caller.tenant, name, self.shape.name, rows, shared, format_, sha256, training)
        return await self._add(caller.tenant, len(rows.data), lambda: self._store.add(new))

    async def add_first(self, name: str, rows: VectorRows, training: Training, caller: Principal) -> Vector:
        """Store a trained, shared vector as the first version of its name.

        Raises:
            ApiError: Those of ``keep``.
            NameUsedError: It is not the first; nothing is stored then.
        """
        check_sharing(caller, shared=True)
        new = NewRow(
            caller.tenant, name, self.shape.name, rows, shared=True, format="trained", training=training,
            is_first=True,
        )  # fmt: skip
        return await self._add(caller.tenant, len(rows.data), lambda: self._store.add(new))

    async def page(self, tenant: str, *, name: str | None, after: str | None, limit: int) -> VectorList:
        """Return a page of a tenant's and shared vectors; raises ApiError ``vector_not_found``."""
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
        """Delete a vector; deleting a shared one requires the scope ``admin``.

        Raises:
            ApiError: ``vector_not_found``, ``missing_scope``.
        """
        vector = await self._store.get(vector_id, caller.tenant)
        await self._remove(vector_id, caller, shared=vector.shared, own=vector.own)

    def resolver(self, tenant: str) -> NameResolver:
        """Return the resolver of a tenant's names, for one request."""
        models = self._engine.served().names
        return NameResolver(self._store, self.cache, self.shape, models, tenant)


__all__ = ["VectorService"]
