"""Resolution of the names of stored things in operations, before a request is compiled.

After that the request equals one that contained the numbers itself: the same plan, fingerprint and cache
salt; and features are given by their ids. The resolved versions are reported in the answer. The dictionaries'
numbers stay in files, which the engine's workers load.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from api_schemas.conditions import InlineProbe, NamedDetector, Test, with_tests
from api_schemas.detectors import DetectorName, DetectorUsed
from api_schemas.dictionaries import DictionaryName, DictionaryUsed, NamedDictionary
from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.fields import NameOrText
from api_schemas.interventions import FIELD, Intervention
from api_schemas.operation_names import condition_of, condition_tests, tensors_of, with_tensors
from api_schemas.operations import Ablate, Detect, Feature, Features, Patch, Probe, Steer
from api_schemas.points import Point, resolve_layer
from api_schemas.tensors import NamedTensor, TensorInput, VectorName, VectorUsed
from app.catalog.catalog import Catalog
from app.catalog.detectors import Detectors
from app.catalog.dictionaries import Dictionaries, FeatureLabels
from app.catalog.rows import LAYER_PREFIX, points_of
from app.catalog.vectors import Vectors
from app.storage.tables import VersionRow
from app.storage.versions import Kind
from nnsight_engine.features.config import StoredDictionary

MAX_DICTIONARIES: Final = 16
"""Maximum number of dictionaries that a request names."""
_MAX_BYTES: Final = 128 * 2**20
"""Maximum bytes of the detectors that a request names, and of the rows that its names resolve to."""
_NUM_CANDIDATES: Final = 8
_ITEM_BYTES: Final = 4

ContentT = TypeVar("ContentT")


class StoredNames:
    """Replaces the names in one request; ``used`` has each named thing, and its kind, by id."""

    def __init__(
        self, vectors: Vectors, detectors: Detectors, dictionaries: Dictionaries, tenant: str
    ) -> None:
        self._vectors = vectors
        self._detectors = detectors
        self._dictionaries = dictionaries
        self._tenant = tenant
        self._by_name: dict[tuple[str, str, str | None], tuple[VersionRow, Any]] = {}
        self._tensors: dict[tuple[int, tuple[int, ...]], NamedTensor] = {}
        self._row_bytes = 0
        self._detector_bytes: dict[str, int] = {}
        self._resolved_dictionaries: dict[str, tuple[NamedDictionary, FeatureLabels]] = {}
        self.used: dict[str, tuple[Kind[Any], VersionRow]] = {}

    @functools.cached_property
    def _num_layers(self) -> int:
        return self._vectors.shape.num_layers

    async def _find(
        self, catalog: Catalog[Any, ContentT], name: NameOrText, param: str
    ) -> tuple[VersionRow, ContentT]:
        """Return a version and its content by name, read once in a request, and note that it is used."""
        key = catalog.kind.name, name.name, name.id
        if key not in self._by_name:
            self._by_name[key] = await catalog.named(name, self._tenant, param)
        row, content = self._by_name[key]
        self.used[row.id] = catalog.kind, row
        return row, content

    async def resolved(self, operations: Sequence[Intervention]) -> tuple[Intervention, ...]:
        return tuple([await self._resolve_operation(op, index) for index, op in enumerate(operations)])

    async def _resolve_operation(self, op: Intervention, index: int) -> Intervention:
        """Return an operation without names, also in its condition; ``index`` is its place in the request."""
        param = f"{FIELD}.{index}"
        if any(isinstance(tensor, VectorName) for tensor in tensors_of(op).values()):
            op = await self._resolve_vectors(op, param)
        match op:
            case Detect():
                op = op.model_copy(
                    update={"detector": await self._resolve_detector(op.detector, f"{param}.detector")}
                )
            case Features():
                op = await self._resolve_features(op, f"{op.op}_{index}", param)
            case Feature():
                op = await self._resolve_feature(op, param)
        when = condition_of(op)
        if when is None:
            return op
        tests = [
            await self._resolve_test(test, f"{param}.{path}") for path, test in condition_tests(op).items()
        ]
        return op.model_copy(update={"when": with_tests(when, iter(tests))})

    async def _resolve_test(self, test: Test, param: str) -> Test:
        """Return a condition's test without names of detectors, dictionaries, features and vectors."""
        if test.detector is not None:
            detector = await self._resolve_detector(test.detector, f"{param}.detector")
            return test.model_copy(update={"detector": detector})
        if test.dictionary is not None and test.feature is not None:
            named, labels = await self._resolve_dictionary(test.dictionary, f"{param}.dictionary")
            (feature,) = await _feature_ids(named, labels, {f"{param}.feature": test.feature})
            return test.model_copy(update={"dictionary": named, "feature": feature})
        if test.probe is not None and isinstance(test.probe.weights, VectorName):
            return test.model_copy(update={"probe": await self._resolve_probe(test.probe, f"{param}.probe")})
        return test

    async def _resolve_features(self, op: Features, default_name: str, param: str) -> Features:
        named, labels = await self._resolve_dictionary(op.dictionary, f"{param}.dictionary")
        named_features = {
            f"{param}.features.{index}": feature for index, feature in enumerate(op.features or ())
        }
        ids = await _feature_ids(named, labels, named_features)
        await labels.of(ids)  # their size is known before the engine is asked
        # Its result is found by its name, and gets the dictionary's labels.
        name = default_name if op.name is None else op.name
        return op.model_copy(update={"dictionary": named, "features": ids or None, "name": name})

    async def _resolve_feature(self, op: Feature, param: str) -> Feature:
        named, labels = await self._resolve_dictionary(op.dictionary, f"{param}.dictionary")
        named_features = {
            f"{param}.changes.{index}.feature": change.feature for index, change in enumerate(op.changes)
        }
        ids = await _feature_ids(named, labels, named_features)
        changes = [
            change.model_copy(update={"feature": feature})
            for change, feature in zip(op.changes, ids, strict=True)
        ]
        return op.model_copy(update={"dictionary": named, "changes": changes})

    async def _resolve_probe(self, probe: InlineProbe, param: str) -> InlineProbe:
        """Return a probe whose weights are a vector's row of its own layer."""
        as_operation = Probe(at=probe.at, weights=probe.weights)
        resolved = await self._resolve_vectors(as_operation, param)
        return (
            probe.model_copy(update={"weights": resolved.weights}) if isinstance(resolved, Probe) else probe
        )

    async def _resolve_vectors(self, op: Intervention, param: str) -> Intervention:
        """Return an operation whose vectors' names are replaced by their rows; raises ApiError."""
        names = {path: tensor for path, tensor in tensors_of(op).items() if isinstance(tensor, VectorName)}
        if isinstance(op, Patch):
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "`patch` takes a row for each position, and a vector has one for each layer; steer with it, "
                "in the mode `replace`.",
                f"{param}.values",
            )
        if not isinstance(op, Steer | Ablate | Probe):
            return op
        tensors: dict[str, TensorInput] = {}
        for path, name in names.items():
            tensor_param = f"{param}.{path}"
            row, data = await self._find(self._vectors, name, tensor_param)
            points = points_of(op.at, self._num_layers, f"{param}.at") if name.layer is None else []
            layers = self._layers_of_points(name, row, points, tensor_param)
            tensors[path] = self._tensor_of_rows(row, data, layers, tensor_param)
        return with_tensors(op, tensors)

    def _layers_of_points(
        self, name: VectorName, row: VersionRow, points: Sequence[Point], param: str
    ) -> tuple[int, ...]:
        """Return the layers whose rows a name means: its own ``layer``, or those of the ``points``."""
        at, stored_layers = row.head["at"], row.head["layers"]
        if name.layer is not None:
            layers: tuple[int, ...] = (resolve_layer(name.layer, self._num_layers, f"{param}.layer"),)
        else:
            strange = next((point for point in points if f"{LAYER_PREFIX}{point.leaf}" != at), None)
            if strange is not None:
                why = f"belongs to {at} and not to {strange}; `layer` beside `name` takes one row everywhere"
                raise self._vectors.mismatch(row, why, param)
            layers = tuple(point.layer for point in points)
        missing = next((layer for layer in layers if layer not in stored_layers), None)
        if missing is not None:
            had = ", ".join(map(str, stored_layers[:_NUM_CANDIDATES])) + ", …" * (
                len(stored_layers) > _NUM_CANDIDATES
            )
            raise self._vectors.mismatch(row, f"has no row for layer {missing}, but for {had}", param)
        return layers

    def _tensor_of_rows(
        self, row: VersionRow, data: bytes, layers: tuple[int, ...], param: str
    ) -> NamedTensor:
        """Return a vector's rows of layers, counted and made once in a request."""
        key, width, stored_layers = (row.number, layers), row.head["width"], row.head["layers"]
        if key not in self._tensors:
            self._row_bytes += _ITEM_BYTES * width * len(layers)
            if self._row_bytes > _MAX_BYTES:
                raise ApiError(
                    ErrorCode.TENSOR_TOO_LARGE,
                    f"What this request's names stand for is more than {_MAX_BYTES} bytes; name fewer "
                    "vectors, or the same layers in the same order.",
                    param,
                )
            rows = np.frombuffer(data, "<f4").reshape(len(stored_layers), width)
            selected = rows[[stored_layers.index(layer) for layer in layers]]
            # One row has the shape [width] and applies to all points, as in a request that contains it.
            shape = [width] if len(layers) == 1 else list(selected.shape)
            used = VectorUsed(name=row.name, version=row.version, id=row.id)
            self._tensors[key] = NamedTensor.of(used, shape, selected.tobytes())
        return self._tensors[key]

    async def _resolve_detector(self, name: DetectorName, param: str) -> NamedDetector:
        row, detector = await self._find(self._detectors, name, param)
        self._detector_bytes[row.id] = sum(
            tensor.nbytes for part in detector.parts for tensor in part.tensors.values()
        )
        if sum(self._detector_bytes.values()) > _MAX_BYTES:
            raise ApiError(
                ErrorCode.TENSOR_TOO_LARGE,
                f"The detectors that a request names may have {_MAX_BYTES} bytes together.",
                param,
            )
        return NamedDetector.of(DetectorUsed(name=row.name, version=row.version, id=row.id), detector)

    async def _resolve_dictionary(
        self, name: DictionaryName, param: str
    ) -> tuple[NamedDictionary, FeatureLabels]:
        """Return a named dictionary, its file read ahead, and its labels; a request may name a few."""
        row, config = await self._find(self._dictionaries, name, param)
        if row.id not in self._resolved_dictionaries:
            if len(self._resolved_dictionaries) == MAX_DICTIONARIES:
                raise ApiError(
                    ErrorCode.TOO_MANY_OPERATIONS,
                    f"All operations together may name {MAX_DICTIONARIES} different dictionaries.",
                    param,
                )
            path = await self._dictionaries.file_of(row)
            at, output_at = row.head["at"], row.head["output_at"]
            content = StoredDictionary(config, at, output_at or at, row.sha256, str(path), row.head["dtype"])
            labels = self._dictionaries.labels_of(row)
            used = DictionaryUsed(name=row.name, version=row.version, id=row.id)
            self._resolved_dictionaries[row.id] = NamedDictionary.of(used, content, labels), labels
        return self._resolved_dictionaries[row.id]


async def _feature_ids(
    dictionary: NamedDictionary, labels: FeatureLabels, features: Mapping[str, int | str]
) -> list[int]:
    """Return the ids of features, given by id or exact label; raises ApiError."""
    texts = [feature for feature in features.values() if isinstance(feature, str)]
    ids_by_label = await labels.ids_of(texts, _NUM_CANDIDATES + 1)
    ids: dict[int, None] = {}
    for param, feature in features.items():
        if isinstance(feature, int):
            feature_id = _checked_id(dictionary, feature, param)
        else:
            feature_id = _only_id(dictionary, feature, ids_by_label[feature], param)
        if feature_id in ids:
            raise ApiError(ErrorCode.INVALID_VALUE, f"The feature {feature_id} is named twice.", param)
        ids[feature_id] = None
    return list(ids)


def _only_id(dictionary: NamedDictionary, label: str, ids: Sequence[int], param: str) -> int:
    if len(ids) == 1:
        return ids[0]
    if not ids:
        search = f"GET /v1/dictionaries/{dictionary.id}/features?query="
        message = (
            f"No feature of {dictionary.name!r} has the label {clip(label)!r}; {search} searches for words."
        )
    else:
        several = ", ".join(map(str, ids[:_NUM_CANDIDATES])) + ", …" * (len(ids) > _NUM_CANDIDATES)
        message = (
            f"Several features of {dictionary.name!r} have the label {clip(label)!r}: {several}. Name one by "
            "its id."
        )
    raise ApiError(ErrorCode.UNKNOWN_FEATURE, message, param)


def _checked_id(dictionary: NamedDictionary, feature: int, param: str) -> int:
    num_features = dictionary.content.config.num_features
    if not 0 <= feature < num_features:
        raise ApiError(
            ErrorCode.UNKNOWN_FEATURE,
            f"{dictionary.name!r} has the features 0 to {num_features - 1}, got {feature}.",
            param,
        )
    return feature
