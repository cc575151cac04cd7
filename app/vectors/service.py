"""The vectors of one server, and the resolution of their names before a request is compiled.

After that the request equals one that contained the values itself: the same plan, fingerprint and cache salt.
The resolved version is recorded on the tensor, and reported in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import safetensors.numpy
from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.interventions import Intervention
from api_schemas.operation_names import tensors_of, with_tensors
from api_schemas.operations import Ablate, Patch, Probe, Steer
from api_schemas.points import Point, resolve_layer
from api_schemas.tensors import NamedTensor, TensorInput, VectorName, VectorUsed
from api_schemas.vectors import Training, Vector, VectorList
from app.auth.principal import Principal
from app.engine.client import EngineClient
from app.http.bodies import BodyLimits
from app.limits.tenant_budget import TenantBudget
from app.settings import Settings
from app.storage.database import Database
from app.storage.quotas import StoredBytes
from app.storage.vectors import FoundVector, NewRow, VectorRows, VectorStore, kind_of
from app.vectors.files import provenance_of, read_upload
from app.vectors.rows import ModelShape, points_of
from app.versions import VersionCache, VersionService, check_sharing

_KIND: Final = "vector"
_MAX_ROWS_BYTES: Final = 128 * 2**20
"""Maximum bytes of the values that one request's names resolve to."""


class NameResolver:
    def __init__(
        self, store: VectorStore, cache: VersionCache, shape: ModelShape, models: Sequence[str], tenant: str
    ) -> None:
        self._store = store
        self._cache = cache
        self._shape = shape
        self._models = models
        self._tenant = tenant
        self._found: dict[tuple[str, str | None], tuple[FoundVector, bytes]] = {}
        self._tensors: dict[tuple[int, tuple[int, ...]], NamedTensor] = {}
        self._num_bytes = 0

    @property
    def found(self) -> list[FoundVector]:
        return [vector for vector, _ in self._found.values()]

    async def resolved(self, op: Intervention, param: str) -> Intervention:
        given = {path: one for path, one in tensors_of(op).items() if isinstance(one, VectorName)}
        if given and isinstance(op, Patch):
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "`patch` takes a row for each position, and a vector has one for each layer; steer with it, "
                "in the mode `replace`.",
                f"{param}.values",
            )
        if not given or not isinstance(op, Steer | Ablate | Probe):
            return op
        found: dict[str, TensorInput] = {}
        for path, name in given.items():
            place = f"{param}.{path}"
            vector, data = await self._find(name, place)
            points = points_of(op.at, self._shape.num_layers, f"{param}.at") if name.layer is None else []
            layers = self._layers(name, vector, points, place)
            found[path] = self._tensor(vector, data, layers, place)
        return with_tensors(op, found)

    async def _find(self, given: VectorName, param: str) -> tuple[FoundVector, bytes]:
        key = given.name, given.id
        if key not in self._found:
            vector = await self._store.find(given.name, given.id, self._tenant, self._models)
            data = None if vector is None else await self._cache.get(_KIND, vector.number, self._data)
            if vector is None or data is None:
                what = repr(clip(given.name)) + (
                    "" if given.id is None else f" with the id {clip(given.id)!r}"
                )
                raise ApiError(
                    ErrorCode.UNKNOWN_VECTOR,
                    f"There is no vector {what}; GET /v1/vectors lists them, POST /v1/vectors makes one.",
                    param,
                )
            self._check_model(vector, param)
            self._found[key] = vector, data
        return self._found[key]

    async def _data(self, number: int) -> tuple[bytes, int] | None:
        data = await self._store.data(number)
        return None if data is None else (data, len(data))

    def _check_model(self, vector: FoundVector, param: str) -> None:
        if vector.model not in self._models or self._shape.widths.get(vector.leaf) != vector.width:
            raise _mismatch(
                vector,
                f"is of the model {clip(vector.model)!r}, and this server has {self._shape.name!r}",
                param,
            )

    def _layers(
        self, given: VectorName, vector: FoundVector, points: Sequence[Point], param: str
    ) -> tuple[int, ...]:
        if given.layer is not None:
            layers: tuple[int, ...] = (resolve_layer(given.layer, self._shape.num_layers, f"{param}.layer"),)
        else:
            strange = next((point for point in points if point.leaf != vector.leaf), None)
            if strange is not None:
                belongs = f"belongs to {kind_of(vector.leaf)} and not to {strange}"
                raise _mismatch(vector, f"{belongs}; `layer` beside `name` takes one row everywhere", param)
            layers = tuple(point.layer for point in points)
        missing = next((layer for layer in layers if layer not in vector.layers), None)
        if missing is not None:
            had = ", ".join(map(str, vector.layers[:8])) + (", …" if len(vector.layers) > 8 else "")
            raise _mismatch(vector, f"has no row for layer {missing}, but for {had}", param)
        return layers

    def _tensor(self, vector: FoundVector, data: bytes, layers: tuple[int, ...], param: str) -> NamedTensor:
        key = (vector.number, layers)
        if key not in self._tensors:
            self._num_bytes += 4 * vector.width * len(layers)
            if self._num_bytes > _MAX_ROWS_BYTES:
                raise ApiError(
                    ErrorCode.TENSOR_TOO_LARGE,
                    f"What this request's names stand for is more than {_MAX_ROWS_BYTES} bytes; name fewer "
                    "vectors, or the same layers in the same order.",
                    param,
                )
            rows = np.frombuffer(data, "<f4").reshape(len(vector.layers), vector.width)
            index = {layer: row for row, layer in enumerate(vector.layers)}
            wanted = rows[[index[layer] for layer in layers]]
            # One row has the shape [width] and applies to all points, as in a request that contains it.
            shape = [vector.width] if len(layers) == 1 else list(wanted.shape)
            used = VectorUsed(name=vector.name, version=vector.version, id=vector.id)
            self._tensors[key] = NamedTensor.of(used, shape, wanted.tobytes())
        return self._tensors[key]


def _mismatch(vector: FoundVector, why: str, param: str) -> ApiError:
    return ApiError(ErrorCode.VECTOR_MISMATCH, f"The vector {vector.name}@{vector.version} {why}.", param)


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
