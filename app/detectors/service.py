from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request

from api_schemas.detectors import (
    Detector as StoredDetector,
)
from api_schemas.detectors import (
    DetectorList,
    DetectorName,
    DetectorTraining,
    RocPoint,
)
from api_schemas.errors import ApiError, ErrorCode, clip
from app.auth.principal import Principal
from app.detectors.files import read_upload, stored_detector, write_file
from app.detectors.parts import check_fit, described
from app.engine.client import EngineClient
from app.engine.served_model import spec_of
from app.http.bodies import BodyLimits
from app.limits.tenant_budget import TenantBudget
from app.settings import Settings
from app.storage.database import Database
from app.storage.detectors import DetectorStore, FoundDetector
from app.storage.quotas import StoredBytes
from app.storage.versions import NewVersion
from app.versions import VersionCache, VersionService, check_sharing
from nnsight_engine.core.detector import Detector
from nnsight_engine.core.model_spec import ModelSpec

_KIND: Final = "detector"


class DetectorService(VersionService[DetectorStore]):
    def __init__(
        self,
        settings: Settings,
        database: Database,
        engine: EngineClient,
        stored: StoredBytes,
        cache: VersionCache,
    ) -> None:
        super().__init__(DetectorStore(database, TenantBudget.of(settings).vector_bytes), stored)
        self._settings = settings
        self._engine = engine
        self._cache = cache

    @property
    def spec(self) -> ModelSpec:
        """The served model, which detectors must fit; only when the engine is ready."""
        return spec_of(self._engine.capabilities())

    @property
    def max_bytes(self) -> int:
        return self._settings.max_tensor_bytes

    async def create(self, request: Request, caller: Principal) -> StoredDetector:
        """Store the detector of a request; raises ApiError, and stores nothing, if it is invalid."""
        settings = self._settings
        limits = BodyLimits(settings.max_body_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
        upload = await read_upload(request, self.spec, limits, self.max_bytes)
        return await self.keep(
            upload.detector,
            upload.calibration,
            caller,
            name=upload.name,
            shared=upload.shared,
            format_=upload.format,
            sha256=upload.sha256,
        )

    async def keep(
        self,
        detector: Detector,
        calibration: list[RocPoint],
        caller: Principal,
        *,
        name: str,
        shared: bool,
        format_: str,
        sha256: str | None = None,
        training: DetectorTraining | None = None,
    ) -> StoredDetector:
        """Store the next version of a name; raises ApiError ``missing_scope``, ``stored_bytes_full``."""
        check_sharing(caller, shared=shared)
        data = await asyncio.to_thread(write_file, detector, calibration)
        new = NewVersion(caller.tenant, name, self._engine.served().names[0], shared, data)
        head = described(detector, calibration)
        return await self._add(
            caller.tenant, len(data), lambda: self._store.add(new, head, format_, sha256, training)
        )

    async def add_first(
        self,
        name: str,
        detector: Detector,
        calibration: list[RocPoint],
        training: DetectorTraining,
        caller: Principal,
    ) -> StoredDetector:
        """Store a trained, shared detector; raises NameUsedError if it is not the first of its name."""
        check_sharing(caller, shared=True)
        data = await asyncio.to_thread(write_file, detector, calibration)
        model = self._engine.served().names[0]
        new = NewVersion(caller.tenant, name, model, shared=True, data=data, is_first=True)
        head = described(detector, calibration)
        return await self._add(
            caller.tenant, len(data), lambda: self._store.add(new, head, "trained", None, training)
        )

    async def page(self, tenant: str, *, name: str | None, after: str | None, limit: int) -> DetectorList:
        """Include shared detectors; raises ApiError ``detector_not_found``."""
        data, has_more = await self._store.page(tenant, name=name, after=after, limit=limit)
        return DetectorList.of(data, has_more=has_more)

    async def get(self, detector_id: str, tenant: str) -> StoredDetector:
        """Return a detector that is visible to a tenant; raises ApiError ``detector_not_found``."""
        return await self._store.get(detector_id, tenant)

    async def content(self, detector_id: str, tenant: str) -> bytes:
        """Return a detector as a safetensors file; raises ApiError ``detector_not_found``."""
        _, data = await self._store.content(detector_id, tenant)
        return data

    async def remove(self, detector_id: str, caller: Principal) -> None:
        """Raise ApiError ``detector_not_found``; ``missing_scope``: a shared one needs ``admin``."""
        detector = await self._store.get(detector_id, caller.tenant)
        await self._remove(detector_id, caller, shared=detector.shared, own=detector.own)

    async def resolved(self, given: DetectorName, tenant: str, param: str) -> tuple[FoundDetector, Detector]:
        """Raise ApiError ``unknown_detector``; ``detector_mismatch``: it is of another model."""
        models = self._engine.served().names
        found = await self._store.find(given.name, given.id, tenant, models)
        detector = None if found is None else await self._cache.get(_KIND, found.number, self._read)
        if found is None or detector is None:
            what = repr(clip(given.name)) + ("" if given.id is None else f" with the id {clip(given.id)!r}")
            raise ApiError(
                ErrorCode.UNKNOWN_DETECTOR,
                f"There is no detector {what}; GET /v1/detectors lists them, POST /v1/detectors makes one.",
                param,
            )
        this = f"The detector {found.name}@{found.version}"
        if found.model not in models:
            raise ApiError(
                ErrorCode.DETECTOR_MISMATCH,
                f"{this} is of the model {clip(found.model)!r}, and this server has {models[0]!r}.",
                param,
            )
        try:
            check_fit(detector, self.spec)
        except ApiError as error:
            message = f"{this} does not fit {models[0]!r}: {error.message}"
            raise ApiError(ErrorCode.DETECTOR_MISMATCH, message, param) from error
        return found, detector

    async def _read(self, number: int) -> tuple[Detector, int] | None:
        data = await self._store.data(number)
        return None if data is None else (await asyncio.to_thread(stored_detector, data), len(data))
