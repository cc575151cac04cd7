"""The vectors of one server: rows of numbers by layer, from files or training, used by operations."""

from __future__ import annotations

import functools
from datetime import UTC, datetime

import numpy as np
import safetensors.numpy
from starlette.requests import Request

from api_schemas.errors import ErrorCode
from api_schemas.vectors import Vector, VectorList
from app.auth.principal import Principal
from app.catalog.catalog import Catalog
from app.catalog.rows import LAYER_PREFIX, ModelShape
from app.catalog.vector_files import VectorForm, from_form, from_json, upload_bytes
from app.storage.tables import VersionRow
from app.storage.versions import Kind


class Vectors(Catalog[Vector, bytes]):
    """Their content is rows, ``[layers, width]``, float32 and little-endian; ``layers`` are ascending."""

    kind = Kind(
        "vector", "vectors", "vec_", Vector, VectorList, lambda budget: budget.vector_bytes,
        counted=("vector", "detector"),
    )  # fmt: skip

    @property
    def shape(self) -> ModelShape:
        """The shape that vectors of the served model must have; only when the engine is ready."""
        return ModelShape.of(self.models[0], self._engine.capabilities())

    async def create(self, request: Request, caller: Principal, *, strict: bool = False) -> Vector:
        """Store the vector of a request, or nothing if it is invalid (ApiError).

        ``strict`` refuses a file that names another model than the served one.
        """
        shape = self.shape
        upload = await self._upload(
            request,
            VectorForm,
            functools.partial(from_form, shape),
            functools.partial(from_json, shape),
            **upload_bytes(shape),
        )
        refused = ErrorCode.VECTOR_MISMATCH if strict else None
        warnings = self._engine.served().warnings_of(upload.model, "The metadata of the file", refused)
        if upload.has_other_training:
            warnings.append("The file's training is not of its numbers, and was left out.")
        added = await self.add(upload.new, caller)
        return added.model_copy(update={"warnings": warnings})

    def _parse(self, data: bytes) -> bytes:
        return data

    def _check_fit(self, row: VersionRow, content: bytes, param: str) -> None:
        del content
        if self.shape.widths.get(row.head["at"].removeprefix(LAYER_PREFIX)) != row.head["width"]:
            raise self.mismatch(row, self._of_other_model(row), param)

    def _file(self, shown: Vector, data: bytes) -> bytes:
        """Return a safetensors file whose metadata say where its numbers come from."""
        rows = np.frombuffer(data, "<f4").reshape(len(shown.layers), shown.width)
        tensors = {
            shown.at.replace("*", str(layer)): row for layer, row in zip(shown.layers, rows, strict=True)
        }
        created = datetime.fromtimestamp(shown.created_at, UTC).isoformat(timespec="seconds")
        metadata = {
            "name": shown.name, "version": str(shown.version), "model": shown.model, "sha256": shown.sha256,
            "format": shown.format, "created_at": created,
        }  # fmt: skip
        if shown.source_sha256 is not None:
            metadata["source_sha256"] = shown.source_sha256
        if shown.training is not None:
            metadata["training"] = shown.training.model_dump_json()
        return safetensors.numpy.save(tensors, metadata)
