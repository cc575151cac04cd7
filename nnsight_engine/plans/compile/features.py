from __future__ import annotations

from typing import Final

from api_schemas.dictionaries import DictionaryName, NamedDictionary
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from api_schemas.interventions import FIELD, Operation
from api_schemas.operations import Feature, Features
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.features.config import Change
from nnsight_engine.features.stored import StoredDictionary
from nnsight_engine.plans.compile.sites import leaf_of, resolve_sites
from nnsight_engine.plans.compile.tensors import check_float32
from nnsight_engine.plans.features import PlannedDictionary, PlannedFeatures
from nnsight_engine.plans.sites import PlannedSite, forward_order

TOP_K: Final = 10
"""Number of features that an operation returns by default."""
_READS: Final = "capture"
_WRITES: Final = "steer"


def num_label_bytes(op: Operation) -> int:
    """Return the bytes of labels for a position; 0 where unknown: features that are 0 are left out."""
    if not isinstance(op, Features) or not isinstance(op.dictionary, NamedDictionary):
        return 0
    ids = [one for one in op.features or () if isinstance(one, int)]
    return 0 if op.dictionary.labels is None else op.dictionary.labels.num_bytes(ids)


def check_labels(num_bytes: int, max_bytes: int, name: str) -> None:
    """Refuse too many bytes of labels (``capture_too_large``); the limits on results count numbers only."""
    if num_bytes > max_bytes:
        raise ApiError(
            ErrorCode.CAPTURE_TOO_LARGE,
            f"With the labels of the features in {clip(name)!r} the answer's labels exceed "
            f"{max_bytes} bytes, the limit of captures; ask for fewer features or positions.",
            FIELD,
        )


class FeatureCompiler:
    def __init__(self, spec: ModelSpec) -> None:
        self.paths: dict[str, str] = {}
        self._spec = spec
        self._used: set[PlannedDictionary] = set()

    def reading(self, op: Features, param: str) -> tuple[PlannedSite, PlannedFeatures]:
        """Return site and features; raise ``unknown_point``, ``wrong_width`` or ``unknown_feature``."""
        stored = self._stored(op.dictionary, f"{param}.dictionary")
        site = self._site(stored.at, stored.config.input_width, _READS, f"{param}.dictionary")
        if op.features is not None:
            ids = tuple(_id(one, stored, f"{param}.features.{i}") for i, one in enumerate(op.features))
            return site, PlannedFeatures(self._planned(stored, f"{param}.dictionary"), ids)
        top_k = min(TOP_K if op.top_k is None else op.top_k, stored.config.num_features)
        return site, PlannedFeatures(self._planned(stored, f"{param}.dictionary"), top_k=top_k)

    def changing(self, op: Feature, param: str) -> tuple[PlannedSite, PlannedFeatures]:
        stored = self._stored(op.dictionary, f"{param}.dictionary")
        source = self._site(stored.at, stored.config.input_width, _READS, f"{param}.dictionary")
        site = self._site(stored.output_at, stored.config.output_width, _WRITES, f"{param}.dictionary")
        if forward_order(source, self._spec) > forward_order(site, self._spec):
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"The transcoder reads {source}, computed after {site}, whose value it reconstructs.",
                f"{param}.dictionary",
            )
        ids, gains, offsets = [], [], []
        for index, one in enumerate(op.changes):
            path = f"{param}.changes.{index}"
            value = check_float32(one.value or 0.0, f"{path}.value")
            change = Change(one.mode)
            ids.append(_id(one.feature, stored, f"{path}.feature"))
            gains.append(change.gain[0] * value + change.gain[1])
            offsets.append(change.offset * value)
        return site, PlannedFeatures(
            self._planned(stored, f"{param}.dictionary"),
            tuple(ids),
            gains=tuple(gains),
            offsets=tuple(offsets),
            source=None if stored.at == stored.output_at else source,
        )

    def activation(
        self, name: DictionaryName, feature: int | str, param: str
    ) -> tuple[PlannedSite, PlannedFeatures]:
        stored = self._stored(name, f"{param}.dictionary")
        site = self._site(stored.at, stored.config.input_width, _READS, f"{param}.dictionary")
        return site, PlannedFeatures(
            self._planned(stored, f"{param}.dictionary"), (_id(feature, stored, f"{param}.feature"),)
        )

    def _planned(self, stored: StoredDictionary, param: str) -> PlannedDictionary:
        planned = PlannedDictionary(stored.sha256, stored.config, stored.dtype)
        self.paths[stored.sha256] = stored.path
        self._used.add(planned)
        num_bytes, limit = sum(one.num_bytes for one in self._used), self._spec.max_dictionary_bytes
        if num_bytes > limit:
            raise ApiError(
                ErrorCode.TENSOR_TOO_LARGE,
                f"The dictionaries of a request have {num_bytes} bytes together, and this server loads at "
                f"most {limit} (loaded_dictionary_bytes).",
                param,
            )
        return planned

    def _stored(self, name: DictionaryName, param: str) -> StoredDictionary:
        if isinstance(name, NamedDictionary) and isinstance(name.content, StoredDictionary):
            return name.content
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A dictionary's name means nothing without the server that keeps it, got {clip(name.name)!r}.",
            param,
        )

    def _site(self, point: str, width: int, operation: str, param: str) -> PlannedSite:
        (site,) = resolve_sites(point, operation, self._spec, param)
        own = leaf_of(site, self._spec).width
        if own != width:
            raise ApiError(
                ErrorCode.WRONG_WIDTH, f"{site} has width {own}, the dictionary has {width}.", param
            )
        return site


def _id(given: int | str, stored: StoredDictionary, param: str) -> int:
    num_features = stored.config.num_features
    if isinstance(given, int) and 0 <= given < num_features:
        return given
    raise ApiError(
        ErrorCode.UNKNOWN_FEATURE,
        f"The dictionary has the features 0 to {num_features - 1}, got {clip(str(given))}.",
        param,
    )
