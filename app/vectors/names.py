"""Resolution of vector names in a request's operations to values, before the request is compiled.

After that the request equals one that contained the values itself: the same plan, fingerprint and cache salt.
The resolved version is recorded on the tensor, and reported in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from api_schemas.interventions import Intervention
from api_schemas.operation_names import tensors_of, with_tensors
from api_schemas.operations import Ablate, Patch, Probe, Steer
from api_schemas.points import Point, resolve_layer
from api_schemas.tensors import NamedTensor, TensorInput, VectorName, VectorUsed
from app.storage.vector_rows import kind_of
from app.storage.vectors import FoundVector, VectorStore
from app.vectors.rows import ModelShape, points_of
from app.version_cache import VersionCache

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


__all__ = ["NameResolver"]
