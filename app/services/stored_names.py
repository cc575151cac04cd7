"""Resolution of the names of stored things in operations, before a request is compiled.

After that the request equals one that contained the numbers itself, and features are given by their ids. The
dictionaries' numbers stay in files, which the engine's workers load.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from api_schemas.conditions import InlineProbe, NamedDetector, Test, with_tests
from api_schemas.detectors import DetectorName
from api_schemas.dictionaries import DictionaryName, NamedDictionary
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD, Intervention
from api_schemas.operation_names import condition_of, condition_tests, tensors_of
from api_schemas.operations import Detect, Feature, Features, Probe
from api_schemas.tensors import VectorName
from app.detectors.service import DetectorService
from app.dictionaries.names import DictionaryResolver, ResolvedDictionary
from app.dictionaries.service import DictionaryService
from app.vectors.service import NameResolver, VectorService

MAX_DICTIONARIES: Final = 16
"""Maximum number of dictionaries that a request names."""
_MAX_BYTES: Final = 128 * 2**20


class StoredNames:
    """Replaces the names in one request; ``used`` has each named thing by id: kind, name, whether shared."""

    def __init__(
        self, vectors: VectorService, detectors: DetectorService, dictionaries: DictionaryService, tenant: str
    ) -> None:
        self._vectors = vectors
        self._detectors = detectors
        self._dictionaries = dictionaries
        self._tenant = tenant
        self._sizes: dict[str, int] = {}
        self._named: dict[str, NamedDictionary] = {}
        self.used: dict[str, tuple[str, str, bool]] = {}

    @functools.cached_property
    def _of_vectors(self) -> NameResolver:
        return self._vectors.resolver(self._tenant)

    @functools.cached_property
    def _of_dictionaries(self) -> DictionaryResolver:
        return self._dictionaries.resolver(self._tenant)

    async def resolved(self, operations: Sequence[Intervention]) -> tuple[Intervention, ...]:
        return tuple([await self._operation(op, index) for index, op in enumerate(operations)])

    async def _operation(self, op: Intervention, index: int) -> Intervention:
        param = f"{FIELD}.{index}"
        if any(isinstance(tensor, VectorName) for tensor in tensors_of(op).values()):
            op = await self._with_vectors(op, param)
        match op:
            case Detect():
                op = op.model_copy(
                    update={"detector": await self._detector(op.detector, f"{param}.detector")}
                )
            case Features():
                op = await self._features(op, f"{op.op}_{index}", param)
            case Feature():
                op = await self._feature(op, param)
        when = condition_of(op)
        if when is None:
            return op
        tests = [await self._test(test, f"{param}.{path}") for path, test in condition_tests(op).items()]
        return op.model_copy(update={"when": with_tests(when, iter(tests))})

    async def _test(self, test: Test, param: str) -> Test:
        if test.detector is not None:
            detector = await self._detector(test.detector, f"{param}.detector")
            return test.model_copy(update={"detector": detector})
        if test.dictionary is not None and test.feature is not None:
            named, found = await self._dictionary(test.dictionary, f"{param}.dictionary")
            (feature,) = await self._of_dictionaries.features(found, {f"{param}.feature": test.feature})
            return test.model_copy(update={"dictionary": named, "feature": feature})
        if test.probe is not None and isinstance(test.probe.weights, VectorName):
            return test.model_copy(update={"probe": await self._probe(test.probe, f"{param}.probe")})
        return test

    async def _features(self, op: Features, default_name: str, param: str) -> Features:
        named, found = await self._dictionary(op.dictionary, f"{param}.dictionary")
        given = {f"{param}.features.{index}": feature for index, feature in enumerate(op.features or ())}
        ids = await self._of_dictionaries.features(found, given)
        await found.labels.of(ids)  # their size is known before the engine is asked
        # Its result is found by its name, and gets the dictionary's labels.
        name = default_name if op.name is None else op.name
        return op.model_copy(update={"dictionary": named, "features": ids or None, "name": name})

    async def _feature(self, op: Feature, param: str) -> Feature:
        named, found = await self._dictionary(op.dictionary, f"{param}.dictionary")
        given = {f"{param}.changes.{index}.feature": one.feature for index, one in enumerate(op.changes)}
        ids = await self._of_dictionaries.features(found, given)
        changes = [
            change.model_copy(update={"feature": feature})
            for change, feature in zip(op.changes, ids, strict=True)
        ]
        return op.model_copy(update={"dictionary": named, "changes": changes})

    async def _probe(self, probe: InlineProbe, param: str) -> InlineProbe:
        """Return a probe whose weights are a vector's row of its own layer."""
        as_operation = Probe(at=probe.at, weights=probe.weights)
        found = await self._with_vectors(as_operation, param)
        return probe.model_copy(update={"weights": found.weights}) if isinstance(found, Probe) else probe

    async def _with_vectors(self, op: Intervention, param: str) -> Intervention:
        op = await self._of_vectors.resolved(op, param)
        for vector in self._of_vectors.found:
            self.used[vector.id] = "vector", vector.name, vector.shared
        return op

    async def _detector(self, name: DetectorName, param: str) -> NamedDetector:
        found, detector = await self._detectors.resolved(name, self._tenant, param)
        self.used[found.id] = "detector", found.name, found.shared
        self._sizes[found.id] = sum(
            tensor.nbytes for part in detector.parts for tensor in part.tensors.values()
        )
        if sum(self._sizes.values()) > _MAX_BYTES:
            raise ApiError(
                ErrorCode.TENSOR_TOO_LARGE,
                f"The detectors that a request names may have {_MAX_BYTES} bytes together.",
                param,
            )
        return NamedDetector.of(found.used, detector)

    async def _dictionary(
        self, name: DictionaryName, param: str
    ) -> tuple[NamedDictionary, ResolvedDictionary]:
        found = await self._of_dictionaries.dictionary(name, param)
        self.used[found.used.id] = "dictionary", found.used.name, found.shared
        if found.used.id not in self._named:
            if len(self._named) == MAX_DICTIONARIES:
                raise ApiError(
                    ErrorCode.TOO_MANY_OPERATIONS,
                    f"All operations together may name {MAX_DICTIONARIES} different dictionaries.",
                    param,
                )
            self._named[found.used.id] = NamedDictionary.of(found.used, found.content, found.labels)
        return self._named[found.used.id], found
