"""The vectors of one server: storage, lookup, and resolution of their names in requests.

``create_app`` creates the one service; the routes below ``/v1/vectors`` and every request whose operations
name a vector use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import safetensors.numpy
from starlette.requests import Request

from api_schemas.interventions import FIELD, Intervention
from api_schemas.keys import Scope
from api_schemas.vectors import Training, Vector, VectorList
from app.auth.principal import Principal
from app.body import BodyLimits
from app.engine.client import EngineClient
from app.settings import Settings
from app.storage.database import Database
from app.storage.storage_usage import Holder, StoredBytes
from app.storage.vector_rows import VectorRows
from app.storage.vectors import NewRow, VectorStore
from app.tenant_budget import TenantBudget
from app.vectors.names import NameResolver, VectorCache
from app.vectors.rows import ModelShape
from app.vectors.uploads import read_upload


class VectorService:
    """The vectors of one server.

    Args:
        settings: The server's.
        database: Stores the vectors; started before this is used.
        engine: Serves the model that the vectors must fit.
        stored: The bytes stored by tenants, here and elsewhere.
    """

    def __init__(
        self, settings: Settings, database: Database, engine: EngineClient, stored: StoredBytes
    ) -> None:
        """Create the parts; nothing is read yet."""
        self._settings = settings
        self._store = VectorStore(database, TenantBudget.of(settings).vector_bytes)
        self._stored, self._kept = stored, stored.place()
        self._adding = asyncio.Lock()
        self._cache = VectorCache(self._store, settings.vector_cache_bytes)
        self._engine = engine

    @property
    def shape(self) -> ModelShape:
        """The shape that vectors of the served model must have; only when the engine is ready."""
        return ModelShape.of(self._engine.served().names[0], self._engine.capabilities())

    @property
    def used_bytes(self) -> int:
        """The bytes of all vectors, as far as this server knows."""
        return self._kept.total

    async def count(self) -> None:
        """Update the stored bytes of each tenant from the database, where other servers write too."""
        self._kept.set(await self._store.used_bytes())

    async def create(self, request: Request, caller: Principal) -> Vector:
        """Read the vector of a request and store it.

        Raises:
            ApiError: The vector is invalid or exceeds a limit; nothing is stored then.
        """
        settings = self._settings
        limits = BodyLimits(settings.max_body_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
        upload = await read_upload(request, self.shape, limits)
        return await self.keep(
            upload.rows,
            caller,
            name=upload.name,
            shared=upload.shared,
            format_=upload.format,
            sha256=upload.sha256,
        )

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
        async with self._adding:  # or concurrent requests could each pass the check for the same free bytes
            await self.count()
            self._stored.check(Holder(caller.tenant), len(rows.data))
            kept = await self._store.add(new)
            await self.count()
        return kept

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
        about = {"name": vector.name, "version": str(vector.version), "model": vector.model}
        return safetensors.numpy.save(tensors, about)

    async def remove(self, vector_id: str, caller: Principal) -> None:
        """Delete a vector; deleting a shared one requires the scope ``admin``.

        Raises:
            ApiError: ``vector_not_found``, ``missing_scope``.
        """
        vector = await self._store.get(vector_id, caller.tenant)
        if vector.shared:
            caller.check(Scope.ADMIN)
        await self._store.remove(vector_id, caller.tenant)
        await self.count()

    async def resolved(self, interventions: Sequence[Intervention], tenant: str) -> tuple[Intervention, ...]:
        """Return a request's operations with the vectors' values in place of their names.

        Raises:
            ApiError: ``unknown_vector``, ``vector_mismatch``, or an error in ``at``.
        """
        models = self._engine.served().names
        resolver = NameResolver(self._store, self._cache, self.shape, models, tenant)
        return tuple(
            [await resolver.resolved(op, f"{FIELD}.{index}") for index, op in enumerate(interventions)]
        )


def check_sharing(caller: Principal, *, shared: bool) -> None:
    """Raise ApiError if a caller without the scope ``admin`` wants to share a vector."""
    if shared:
        caller.check(Scope.ADMIN)


__all__ = ["VectorService", "check_sharing"]
