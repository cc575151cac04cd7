"""Serialization of a choice's collected results as the JSON of its ``interventions`` field.

Tensors are inline as base64 while their total size is small, and otherwise in one safetensors file of the
result store; so are numbers whose JSON would be large. Activations of features have their labels.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from api_schemas.dictionaries import LabelReader, NamedDictionary
from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.interventions import Intervention
from api_schemas.operation_names import detectors_used, dictionaries_used, vectors_used
from api_schemas.operations import Features, Steer
from app.formats.json_text import Rows
from app.settings import Settings
from app.storage.results import ResultStore
from nnsight_engine.core.work_context import WorkContext
from nnsight_engine.plans.collect.results import (
    CollectedCapture,
    CollectedFeatures,
    CollectedLens,
    CollectedMarks,
    CollectedProbe,
    CollectedResult,
    CollectedResults,
    CollectedScores,
    CollectedSites,
    CollectedToken,
    CollectedTrace,
    LensRows,
    TensorResult,
)
from nnsight_engine.plans.compile.conditions import check_labels
from nnsight_engine.plans.records import NUMBER_TEXT_BYTES, OBJECT_TEXT_BYTES


class LabelBudget:
    """The bytes of labels that one answer may have; the engine's limits count activations only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def spend(self, num_bytes: int, name: str) -> None:
        self._num_bytes += num_bytes
        check_labels(self._num_bytes, self._max_bytes, name)


async def features_json(
    result: CollectedFeatures, operations: Sequence[Intervention], budget: LabelBudget
) -> dict[str, Any]:
    """Return active features as JSON, with their labels.

    Raises ApiError ``capture_too_large`` if the labels exceed the budget of the answer.
    """
    active = result.ids[result.activations != 0.0] if result.drops_zeros else result.ids
    features, counts = np.unique(active, return_counts=True)
    reader = _label_reader(result.name, operations)
    labels = {} if reader is None else await reader.of(features.tolist())
    sizes = [
        len(labels[feature_id].encode()) if feature_id in labels else 0 for feature_id in features.tolist()
    ]
    budget.spend(int(np.dot(sizes, counts)), result.name)

    def rows_between(start: int, stop: int) -> Iterator[list[dict[str, Any]]]:
        for row in result.rows(start, stop):
            yield [
                {"id": feature_id, "label": labels.get(feature_id), "activation": value}
                for feature_id, value in row
            ]

    rows = Rows(len(result.ids), result.ids.shape[1], rows_between)
    return {"type": "features", "positions": result.positions, "features": rows}


def _label_reader(name: str, operations: Sequence[Intervention]) -> LabelReader | None:
    """Return the labels of the dictionary that the operation of a result reads; None for an unnamed one."""
    for operation in operations:
        if (
            isinstance(operation, Features)
            and operation.name == name
            and isinstance(operation.dictionary, NamedDictionary)
        ):
            return operation.dictionary.labels
    return None


_LOWEST_LOGPROB: Final = -9999.0
"""Replaces the logarithm of zero, as in vLLM's own log-probabilities."""

_NUMBER_BYTES: Final = 4
"""Size of a single number, as the engine stores it."""

_GROWN: Final = "~grown"
"""The first part of a file's keys for items that lists grew by; no key of a saved value begins with it."""

_NUMBERS: Final[Mapping[type[Any], tuple[str, str, Any]]] = {
    CollectedProbe: ("probe", "points", {}),
    CollectedScores: ("detect", "scores", []),
    CollectedFeatures: ("features", "features", []),
    CollectedLens: ("logit_lens", "layers", {}),
}
"""Type and field of results whose numbers may be in a file, and the field's value then."""

Decode = Callable[[int], str]
Array = npt.NDArray[np.float32] | npt.NDArray[np.int32]

_Plain = CollectedCapture | CollectedProbe | CollectedLens | CollectedScores | CollectedMarks | CollectedTrace


async def choice_json(
    collected: CollectedResults,
    *,
    store: ResultStore,
    work: WorkContext,
    settings: Settings,
    decode: Decode,
    base_path: str = "",
    operations: Sequence[Intervention] = (),
    inline: bool = False,
) -> dict[str, Any]:
    """Return the ``interventions`` object of one choice, or of one token's part of it; raises ApiError.

    Args:
        work: The request's: its tenant owns the tensors, its meter counts them.
        operations: Those of the choice's prompt; named ones add the version used, and features their labels.
        inline: Whether tensors and numbers stay in the answer, however large.
        base_path: The prefix of ``/v1`` in the server's URLs (ASGI's ``root_path``).
    """
    arrays = {result.name: _arrays_of(result) for result in collected.results}
    work.meter.captured_bytes += sum(map(_num_bytes, arrays.values()))
    text_bytes = sum(_text_bytes(result, arrays[result.name]) for result in collected.results)
    has_large_text = text_bytes > settings.inline_json_bytes and not inline
    # Tensors are embedded or linked by their total size, numbers are linked if their JSON would be large.
    tensors, numbers, labels = (
        _TensorsInFile(),
        _TensorsInFile(),
        LabelBudget(settings.max_capture_bytes_per_request),
    )
    answer: dict[str, Any] = {"results": {}}
    for result in collected.results:
        if has_large_text and (result_arrays := arrays[result.name]):
            links = {
                path: numbers.add(result.name, path, _tensor_of(array))
                for path, array in result_arrays.items()
            }
            result_json = _linked_json(result, links)
        elif isinstance(result, CollectedFeatures):
            result_json = await features_json(result, operations, labels)
        else:
            result_json = _result_json(result, tensors, decode)
        answer["results"][result.name] = result_json
    num_bytes = sum(len(tensor.data) for tensor, _ in tensors.values())
    work.meter.captured_bytes += num_bytes
    if inline or num_bytes <= settings.inline_tensor_bytes:
        tensors.embed()
    if in_file := {**tensors, **numbers}:
        file = await store.put(
            {key: tensor for key, (tensor, _) in in_file.items()}, work.tenant, work.meter.key_id
        )
        _link_tensors(in_file, f"{base_path}/v1/results/{file.id}", file.expires_at)
    if collected.final:
        work.note_tier(collected.tier)
        answer |= _final_json(collected, operations, work)
    return answer


def _final_json(
    collected: CollectedResults, operations: Sequence[Intervention], work: WorkContext
) -> dict[str, Any]:
    """Return what the last results of a choice tell beside the results: how they came about."""
    answer: dict[str, Any] = {"provenance": {"tier": collected.tier}}
    if not collected.is_code:
        answer = {
            "applied": _applied_json(collected.applied, operations),
            "provenance": {
                "fingerprint": collected.fingerprint,
                "cached_tokens": collected.cached_tokens,
                "recomputed_tokens": collected.recomputed_tokens,
                "drafted_rows": collected.drafted_rows,
                "refused_rows": collected.refused_rows,
                "tier": collected.tier,
            },
        }
    if work.presets:
        answer["provenance"]["presets"] = list(work.presets)
    return answer


async def tensors_json(
    tensors: Mapping[str, TensorResult],
    store: ResultStore,
    work: WorkContext,
    settings: Settings,
    *,
    base_path: str = "",
) -> dict[str, Any]:
    """Return tensors by their names: inline while they are small together, and else in one file."""
    in_file = _TensorsInFile()
    tensors_by_name = {name: in_file.add(name, "tensor", tensor) for name, tensor in tensors.items()}
    if sum(len(tensor.data) for tensor in tensors.values()) <= settings.inline_tensor_bytes:
        in_file.embed()
    else:
        file = await store.put(
            {key: tensor for key, (tensor, _) in in_file.items()}, work.tenant, work.meter.key_id
        )
        _link_tensors(in_file, f"{base_path}/v1/results/{file.id}", file.expires_at)
    return tensors_by_name


def _applied_json(
    applied: Sequence[CollectedSites], operations: Sequence[Intervention]
) -> list[dict[str, Any]]:
    """Return where each operation was applied, with the versions of the stored things that it named."""
    plain = [
        {key: value for key, value in dataclasses.asdict(entry).items() if value is not None}
        for entry in applied
    ]
    for entry, operation in zip(plain, operations, strict=False):
        detectors = [detector.model_dump() for detector in detectors_used(operation).values()]
        if detectors:
            entry["detectors"] = detectors
        dictionaries = [dictionary.model_dump() for dictionary in dictionaries_used(operation).values()]
        if dictionaries:
            entry["dictionaries"] = dictionaries
        used = [
            vector.model_dump()
            for path, vector in vectors_used(operation).items()
            if not path.startswith("when.")
        ]
        if used and isinstance(operation, Steer) and operation.vectors is not None:
            entry["vectors"] = used
        elif used:
            (entry["vector"],) = used
    return plain


def _num_bytes(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _text_bytes(result: CollectedResult, arrays: Mapping[str, Array]) -> int:
    """Return about how many bytes a result's numbers have as JSON."""
    num_numbers = _num_bytes(arrays) // _NUMBER_BYTES
    is_plain = isinstance(result, CollectedProbe | CollectedScores)
    # A token or a feature has two numbers.
    return num_numbers * NUMBER_TEXT_BYTES if is_plain else num_numbers // 2 * OBJECT_TEXT_BYTES


def _arrays_of(result: CollectedResult) -> dict[str, Array]:
    """Return the numbers of a result that may be in a file instead, by their paths in it."""
    if isinstance(result, CollectedProbe):
        return dict(result.points)
    if isinstance(result, CollectedScores):
        return {"scores": result.scores}
    if isinstance(result, CollectedFeatures):
        return {"ids": result.ids, "activations": result.activations}
    if isinstance(result, CollectedLens):
        return {
            f"{layer}/{name}": getattr(rows, name)
            for layer, rows in result.layers.items()
            for name in ("ids", "logprobs", "target_logprobs", "ranks")
        }
    return {}


def _tensor_of(array: Array) -> TensorResult:
    values = array.astype(np.int64) if array.dtype == np.int32 else array
    return TensorResult(values.dtype.name, values.shape, values.tobytes())


def _linked_json(result: CollectedResult, links: dict[str, Any]) -> dict[str, Any]:
    kind, field, empty = _NUMBERS[type(result)]
    return {"type": kind, "positions": result.positions, field: empty, "tensors": links}  # type: ignore[union-attr]  # no trace's


class _TensorsInFile(dict[str, tuple[TensorResult, dict[str, Any]]]):
    """Tensors by their keys in a file, each with its object in the answer, which is filled in last."""

    def add(self, name: str, path: str, tensor: TensorResult) -> dict[str, Any]:
        """Add a tensor; return its object in the answer, which ``embed`` or ``_link_tensors`` fills in."""
        key = f"{_escaped(name)}/{path}"
        if key in self:
            raise ApiError(
                ErrorCode.TRACE_FAILED,
                f"Each saved tensor needs a path of its own in the answer, and two have {clip(key)!r}: a "
                "number and its digits are the same key in JSON. Use different keys.",
            )
        self[key] = tensor, {}
        return self[key][1]

    def embed(self) -> None:
        """Fill in the tensors as base64; none is left for a file."""
        for tensor, tensor_json in self.values():
            tensor_json["dtype"], tensor_json["shape"] = tensor.dtype, list(tensor.shape)
            tensor_json["data"] = base64.b64encode(tensor.data).decode("ascii")
            tensor_json["encoding"] = "base64"
        self.clear()


def _link_tensors(
    tensors: Mapping[str, tuple[TensorResult, dict[str, Any]]], url: str, expires_at: float
) -> None:
    """Fill in the objects of tensors in a stored file: its URL, the tensor's key in it, and its expiry."""
    for key, (tensor, tensor_json) in tensors.items():
        tensor_json["url"], tensor_json["format"], tensor_json["key"] = url, "safetensors", key
        tensor_json["dtype"], tensor_json["shape"] = tensor.dtype, list(tensor.shape)
        tensor_json["expires_at"] = math.floor(
            expires_at
        )  # the file exists at least as long as the answer says


def _path_below(path: str, key: object) -> str:
    """Return the path of an item, escaped as in JSON pointers, so that paths of different keys differ."""
    return f"{path}/{_escaped(str(key))}"


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _result_json(result: _Plain, tensors: _TensorsInFile, decode: Decode) -> dict[str, Any]:
    if isinstance(result, CollectedCapture):
        return _capture_json(result, tensors)
    if isinstance(result, CollectedTrace):
        return _trace_json(result, tensors)
    if isinstance(result, CollectedProbe):
        points = {point: _number_rows(values) for point, values in result.points.items()}
        return {"type": "probe", "positions": result.positions, "points": points}
    if isinstance(result, CollectedScores):
        return {"type": "detect", "positions": result.positions, "scores": _number_rows(result.scores)}
    if isinstance(result, CollectedMarks):
        return {"type": result.kind, "positions": result.positions}
    layers = {str(layer): _lens_rows(rows, decode) for layer, rows in result.layers.items()}
    return {"type": "logit_lens", "positions": result.positions, "layers": layers}


def _number_rows(values: Array) -> Rows:
    return Rows(len(values), 1, lambda start, stop: values[start:stop].tolist())


def _lens_rows(rows: LensRows, decode: Decode) -> Rows:
    """Return a layer's rows, one for each position, that are made while they are serialized."""

    def rows_between(start: int, stop: int) -> Iterator[dict[str, Any]]:
        for top, targets in rows.rows(start, stop):
            yield {
                "top": [_token_json(token, decode) for token in top],
                "targets": [_token_json(token, decode) for token in targets],
            }

    return Rows(len(rows.ids), rows.ids.shape[1] + len(rows.targets), rows_between)


def _capture_json(capture: CollectedCapture, tensors: _TensorsInFile) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "type": "capture",
        "positions": capture.positions,
        "points": {
            point: tensors.add(capture.name, _escaped(point), tensor)
            for point, tensor in capture.points.items()
        },
    }
    if capture.reduce != "none":
        answer["reduce"] = capture.reduce
    return answer


def _trace_json(result: CollectedTrace, tensors: _TensorsInFile) -> dict[str, Any]:
    """Return what a trace has saved as JSON; its tensors are added to ``tensors``."""

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, TensorResult):
            return tensors.add(result.name, path, value)
        if isinstance(value, dict):
            return {key: plain(item, _path_below(path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item, _path_below(path, index)) for index, item in enumerate(value)]
        return value

    answer: dict[str, Any] = {"type": "trace", "saves": {}}
    answer["saves"] = {name: plain(value, _escaped(name)) for name, value in result.saves.items()}
    if result.grown:
        answer["grown"] = {
            name: plain(value, _path_below(_GROWN, name)) for name, value in result.grown.items()
        }
    if result.printed:
        answer["printed"] = result.printed
    if result.warnings:
        answer["warnings"] = list(result.warnings)
    return answer


def _token_json(token: CollectedToken, decode: Decode) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "token": decode(token.id),
        "id": token.id,
        "logprob": max(token.logprob, _LOWEST_LOGPROB) if not math.isnan(token.logprob) else None,
    }
    if token.rank is not None:
        answer["rank"] = token.rank
    return answer
