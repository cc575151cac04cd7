"""Compiles detectors, conditions and features of a request into plain data.

A test decides for the same position if the forward pass reaches its last point before the first point of its
operation. Otherwise it decides for the next position, which rows of a prompt cannot wait for.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from api_schemas.conditions import AllOf, AnyOf, InlineProbe, NamedDetector, Not, Test, When
from api_schemas.detectors import DetectorName
from api_schemas.dictionaries import DictionaryName, NamedDictionary
from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.interventions import FIELD, Operation
from api_schemas.operations import Feature, Features
from api_schemas.points import VISION
from nnsight_engine.core.detector import Detector, Form
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.features.config import Change, StoredDictionary
from nnsight_engine.plans.compile.scope import MatchedPositions, leaf_of, resolve_sites
from nnsight_engine.plans.compile.tensors import check_float32, check_rows, read_weights
from nnsight_engine.plans.request_plan import (
    AND,
    LOGITS,
    NOT,
    OR,
    PlannedCondition,
    PlannedDictionary,
    PlannedFeatures,
    PlannedScore,
    PlannedSite,
    PlannedTest,
    ScorePart,
    TensorData,
    forward_order,
)

TOP_K: Final = 10
"""Number of features that an operation returns by default."""
_READS: Final = "capture"
_WRITES: Final = "steer"


def num_label_bytes(op: Operation) -> int:
    """Return the bytes of labels for a position; 0 where unknown: features that are 0 are left out."""
    if not isinstance(op, Features) or not isinstance(op.dictionary, NamedDictionary):
        return 0
    ids = [feature for feature in op.features or () if isinstance(feature, int)]
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
    """Compiles features that operations and tests name; ``paths`` are dictionaries' files by hash."""

    def __init__(self, spec: ModelSpec) -> None:
        self.paths: dict[str, str] = {}
        self._spec = spec
        self._used: set[PlannedDictionary] = set()

    def reading(self, op: Features, param: str) -> tuple[PlannedSite, PlannedFeatures]:
        """Return site and features; raise ``unknown_point``, ``wrong_width`` or ``unknown_feature``."""
        stored = self._stored(op.dictionary, f"{param}.dictionary")
        site = self._site(stored.at, stored.config.input_width, _READS, f"{param}.dictionary")
        if op.features is not None:
            ids = tuple(
                _id(feature, stored, f"{param}.features.{i}") for i, feature in enumerate(op.features)
            )
            return site, PlannedFeatures(self._planned(stored, f"{param}.dictionary"), ids)
        top_k = min(TOP_K if op.top_k is None else op.top_k, stored.config.num_features)
        return site, PlannedFeatures(self._planned(stored, f"{param}.dictionary"), top_k=top_k)

    def changing(self, op: Feature, param: str) -> tuple[PlannedSite, PlannedFeatures]:
        """Return the site of the write, and the changes, ``gain * a + offset`` of ``a``; see ``reading``."""
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
        for index, feature_change in enumerate(op.changes):
            path = f"{param}.changes.{index}"
            value = check_float32(feature_change.value or 0.0, f"{path}.value")
            change = Change(feature_change.mode)
            ids.append(_id(feature_change.feature, stored, f"{path}.feature"))
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
        """Return the site that a test reads, and its one feature; raises as ``reading``."""
        stored = self._stored(name, f"{param}.dictionary")
        site = self._site(stored.at, stored.config.input_width, _READS, f"{param}.dictionary")
        return site, PlannedFeatures(
            self._planned(stored, f"{param}.dictionary"), (_id(feature, stored, f"{param}.feature"),)
        )

    def _planned(self, stored: StoredDictionary, param: str) -> PlannedDictionary:
        """Return a dictionary for the plan, and count it: a request's are loaded together, within a limit."""
        planned = PlannedDictionary(stored.sha256, stored.config, stored.dtype)
        self.paths[stored.sha256] = stored.path
        self._used.add(planned)
        num_bytes, limit = (
            sum(dictionary.num_bytes for dictionary in self._used),
            self._spec.max_dictionary_bytes,
        )
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
        """Return the site of a dictionary's point; raise ``wrong_width`` if it has another width there."""
        (site,) = resolve_sites(point, operation, self._spec, param)
        point_width = leaf_of(site, self._spec).width
        if point_width != width:
            raise ApiError(
                ErrorCode.WRONG_WIDTH, f"{site} has width {point_width}, the dictionary has {width}.", param
            )
        return site


def _id(feature: int | str, stored: StoredDictionary, param: str) -> int:
    """Return a feature's id; labels are resolved before, so any text is refused (``unknown_feature``)."""
    num_features = stored.config.num_features
    if isinstance(feature, int) and 0 <= feature < num_features:
        return feature
    raise ApiError(
        ErrorCode.UNKNOWN_FEATURE,
        f"The dictionary has the features 0 to {num_features - 1}, got {clip(str(feature))}.",
        param,
    )


_PROBE: Final = "probe"


class ConditionCompiler:
    def __init__(self, spec: ModelSpec, tensors: dict[str, TensorData], features: FeatureCompiler) -> None:
        self._spec = spec
        self._features = features
        self._tensors = tensors

    def detector(self, name: DetectorName, param: str) -> PlannedScore:
        """Return a named detector; raise ``unknown_detector``, or ApiError for its points and form."""
        self._check_stages(param)
        return self._detector(_detector_of(name, param), param)

    def condition(
        self, when: When, sites: tuple[PlannedSite, ...], matched: MatchedPositions, param: str
    ) -> PlannedCondition:
        """Return a condition, in postfix order; ``sites`` are the operation's, none behind the forward pass.

        Raises ``unsupported_combination`` if a test reads too late for rows of a prompt.
        """
        self._check_stages(param)
        tests: list[PlannedTest] = []
        program: list[int | str] = []

        def add(node: When, path: str) -> None:
            match node:
                case AllOf():
                    join(node.all, AND, f"{path}.all")
                case AnyOf():
                    join(node.any, OR, f"{path}.any")
                case Not():
                    add(node.not_, f"{path}.not")
                    program.append(NOT)
                case _:
                    program.append(len(tests))
                    tests.append(self._test(node, sites, matched, path))

        def join(nodes: list[When], word: str, path: str) -> None:
            for index, node in enumerate(nodes):
                add(node, f"{path}.{index}")
                if index:
                    program.append(word)

        add(when, param)
        return PlannedCondition(tuple(tests), tuple(program))

    def _test(
        self, test: Test, sites: tuple[PlannedSite, ...], matched: MatchedPositions, param: str
    ) -> PlannedTest:
        """Return one test; a detector's own threshold is used if it gives none. ``below`` has the sign -1."""
        threshold = test.above if test.below is None else test.below
        if test.probe is not None:
            score = self._probe(test.probe, f"{param}.{_PROBE}")
        elif test.dictionary is not None and test.feature is not None:
            site, features = self._features.activation(test.dictionary, test.feature, param)
            score = PlannedScore((ScorePart(site, None, features=features),))
            threshold = 0.0 if threshold is None else threshold
        else:
            content = _detector_of(test.detector, f"{param}.detector")
            score = self._detector(content, f"{param}.detector")
            if threshold is None and content.threshold is not None:
                # A detector holds at its threshold, a test above its own.
                threshold = float(np.nextafter(np.float32(content.threshold), np.float32(-np.inf)))
        if threshold is None:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                "The detector has no threshold of its own; give `above` or `below`.",
                param,
            )
        for number, field in (
            (threshold, "above" if test.below is None else "below"),
            (test.hysteresis, "hysteresis"),
        ):
            check_float32(number, f"{param}.{field}")
        sign = 1 if test.below is None else -1
        return PlannedTest(
            score,
            sign * threshold,
            sign,
            test.over,
            test.of or 1,
            test.reduce,
            test.until == "end",
            test.hysteresis,
            self._is_next(score, sites, matched, param),
        )

    def _is_next(
        self, score: PlannedScore, sites: tuple[PlannedSite, ...], matched: MatchedPositions, param: str
    ) -> bool:
        """Return whether a test decides for the next position: it reads after the first of ``sites``."""
        if not sites:
            return False
        read = score.sites[-1]
        first = min(sites, key=lambda site: forward_order(site, self._spec))
        if forward_order(read, self._spec) <= forward_order(first, self._spec):
            return False
        if matched.num_prompt:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"The condition reads {read}, which is computed after {first}, where the operation acts. So "
                "it decides for the next position, and the positions of a prompt are computed together. Name "
                "`phase` generated in `where`, or read an earlier point.",
                param,
            )
        return True

    def _probe(self, probe: InlineProbe, param: str) -> PlannedScore:
        """Return the score of a probe that is written in the condition itself."""
        sites = resolve_sites(probe.at, _PROBE, self._spec, f"{param}.at")
        if len(sites) > 1:
            raise ApiError(ErrorCode.INVALID_VALUE, "A condition's probe reads one point.", f"{param}.at")
        self._check_readable(sites[0], f"{param}.at")
        tensor = read_weights(probe.weights, f"{param}.weights")
        check_rows(tensor, [leaf_of(sites[0], self._spec).width], f"{param}.weights")
        if len(tensor.shape) > 1:
            tensor = TensorData(tensor.dtype, tensor.shape[-1:], tensor.data)
        bias = check_float32(probe.bias, f"{param}.bias")
        key = tensor.key()
        self._tensors[key] = tensor
        part = ScorePart(sites[0], Form.LINEAR, (("weights", key),))
        return PlannedScore((part,), bias)

    def _detector(self, detector: Detector, param: str) -> PlannedScore:
        """Return the score of a stored detector, whose parts are put into the order of the forward pass."""
        parts = []
        for part, content in zip(detector.parts, _content_of(detector), strict=True):
            (site,) = resolve_sites(part.point, _PROBE, self._spec, param)
            self._check_readable(site, param)
            for key, tensor in content.values():
                self._tensors[key] = tensor
            tensors = tuple((name, key) for name, (key, _) in content.items())
            parts.append(ScorePart(site, part.form, tensors))
        parts.sort(key=lambda part: forward_order(part.site, self._spec))
        return PlannedScore(tuple(parts), detector.bias, detector.link)

    def _check_stages(self, param: str) -> None:
        if self._spec.num_stages > 1:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"Detectors and conditions need a model in one pipeline stage; this server's has "
                f"{self._spec.num_stages}.",
                param,
            )

    def _check_readable(self, site: PlannedSite, param: str) -> None:
        """Refuse points whose values tests cannot read in the step: logits, and those of images."""
        if site == LOGITS or site.is_in_encoder or site.leaf == VISION:
            raise ApiError(
                ErrorCode.UNSUPPORTED_AT_POINT,
                f"Conditions and detectors read points inside the model, at every position; not {site}.",
                param,
            )


_CONTENTS: Final[WeakKeyDictionary[Detector, tuple[dict[str, tuple[str, TensorData]], ...]]] = (
    WeakKeyDictionary()
)
"""The keys and tensors of each part of a detector, by name: hashed once, however many tests and prompts."""


def _content_of(detector: Detector) -> tuple[dict[str, tuple[str, TensorData]], ...]:
    """Return the keys and tensors of each part of a detector, by name; they are hashed once for all calls."""
    content = _CONTENTS.get(detector)
    if content is None:
        parts = ({name: _tensor(tensor) for name, tensor in part.tensors.items()} for part in detector.parts)
        content = tuple({name: (tensor.key(), tensor) for name, tensor in part.items()} for part in parts)
        _CONTENTS[detector] = content
    return content


def _detector_of(name: DetectorName | None, param: str) -> Detector:
    if isinstance(name, NamedDetector) and isinstance(name.content, Detector):
        return name.content
    got = "" if name is None else f", got {clip(name.name)!r}"
    raise ApiError(
        ErrorCode.INVALID_VALUE,
        f"A detector's name means nothing without the server that keeps it{got}; give a `probe`.",
        param,
    )


def _tensor(numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> TensorData:
    return TensorData("float32", numbers.shape, np.ascontiguousarray(numbers, "<f4").tobytes())
