"""The detectors of one server: from files or training, for requests to use by name."""

from __future__ import annotations

import functools

from starlette.requests import Request

from api_schemas.detectors import Detector as StoredDetector
from api_schemas.detectors import DetectorList
from api_schemas.errors import ApiError
from app.auth.principal import Principal
from app.catalog.catalog import Catalog
from app.catalog.detector_files import DetectorForm, from_form, from_json, stored_detector, upload_bytes
from app.catalog.detector_parts import check_fit
from app.engine.served_model import spec_of
from app.storage.tables import VersionRow
from app.storage.versions import Kind
from nnsight_engine.core.detector import Detector
from nnsight_engine.core.model_spec import ModelSpec


class Detectors(Catalog[StoredDetector, Detector]):
    """Their content is a file, see ``detector_files``."""

    kind = Kind(
        "detector", "detectors", "det_", StoredDetector, DetectorList, lambda budget: budget.vector_bytes,
        counted=("vector", "detector"),
    )  # fmt: skip

    @property
    def spec(self) -> ModelSpec:
        """The served model, which detectors must fit; only when the engine is ready."""
        return spec_of(self._engine.capabilities())

    @property
    def max_bytes(self) -> int:
        return self._settings.bounds.max_tensor_bytes

    async def create(self, request: Request, caller: Principal) -> StoredDetector:
        """Store the detector of a request; raises ApiError, and stores nothing, if it is invalid."""
        model = self.spec, self.max_bytes
        new = await self._upload(
            request,
            DetectorForm,
            functools.partial(from_form, *model),
            functools.partial(from_json, *model),
            **upload_bytes(self.max_bytes, self._settings.max_body_bytes),
        )
        return await self.add(new, caller)

    def _parse(self, data: bytes) -> Detector:
        return stored_detector(data)

    def _check_fit(self, row: VersionRow, content: Detector, param: str) -> None:
        try:
            check_fit(content, self.spec)
        except ApiError as error:
            why = f"does not fit {self.models[0]!r}: {error.message.removesuffix('.')}"
            raise self.mismatch(row, why, param) from error
