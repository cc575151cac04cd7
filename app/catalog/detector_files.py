"""A detector as a safetensors file, as stored, sent and uploaded: ``parts.N.NAME``, its head as metadata.

The body of ``POST /v1/detectors``, head and numbers in JSON, or a file in a form, becomes the version to be
stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from api_schemas.detectors import DetectorHead, DetectorTraining, NewDetector, NewPart, PartHead, RocPoint
from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.fields import RequestLimits, StoredName, Strict
from app.catalog.detector_parts import description_of, detector_of, invalid, part_of
from app.catalog.vector_files import SLACK_BYTES, array_of
from app.formats.json_bodies import exceeds_depth, parse_object
from app.formats.uploads import FILE, is_safetensors, read_safetensors, refuse_pickle
from app.http.errors import validated
from app.storage.versions import NewVersion
from nnsight_engine.core.detector import TENSORS, Detector, DetectorPart, Form, Link
from nnsight_engine.core.model_spec import ModelSpec

HEAD: Final = "head"
"""The field of a form with the head."""
METADATA: Final = "detector"
"""The metadata of a file with the head."""

_MAX_DEPTH: Final = 8
_ITEM_BYTES: Final = 4
_ADVICE: Final = (
    "Save tensors with safetensors: safetensors.torch.save_file({'parts.0.weights': row}, "
    "'refusal.safetensors', {'detector': json.dumps(head)})."
)


def new_version(
    detector: Detector,
    calibration: Sequence[RocPoint],
    name: str,
    format_: str,
    *,
    shared: bool,
    source_sha256: str | None = None,
    training: DetectorTraining | None = None,
    is_first: bool = False,
) -> NewVersion:
    """Return a detector to be stored; ``source_sha256`` is that of the uploaded file."""
    head = {
        **description_of(detector, calibration),
        "format": format_,
        "source_sha256": source_sha256,
        "training": None if training is None else training.model_dump(mode="json"),
    }
    return NewVersion(name, shared, head, write_file(detector, calibration), is_first=is_first)


def write_file(detector: Detector, calibration: Sequence[RocPoint]) -> bytes:
    """Return a detector as a file; the same detector gives the same bytes."""
    head = DetectorHead(
        parts=[PartHead(at=part.point, form=part.form.value) for part in detector.parts],
        bias=detector.bias,
        link=detector.link.value,
        threshold=detector.threshold,
        calibration=list(calibration),
    )
    tensors = {
        # The library writes the memory of an array, whatever its strides.
        f"parts.{index}.{name}": np.ascontiguousarray(tensor)
        for index, part in enumerate(detector.parts)
        for name, tensor in part.tensors.items()
    }
    return safetensors.numpy.save(tensors, {METADATA: head.model_dump_json()})


def stored_detector(data: bytes) -> Detector:
    """Return the detector of a file that the server has stored; see ``read_file`` for uploads."""
    content = read_safetensors(data, ErrorCode.INTERNAL)
    head = DetectorHead.model_validate_json(content.metadata[METADATA])
    by_part = _by_part(content.tensors, len(head.parts))
    parts = [
        DetectorPart(part.at, Form(part.form), tensors)
        for part, tensors in zip(head.parts, by_part, strict=True)
    ]
    return Detector(tuple(parts), head.bias, Link(head.link), head.threshold)


def read_file(
    data: bytes, name: str, head_text: str | None, spec: ModelSpec, max_bytes: int
) -> tuple[Detector, list[RocPoint]]:
    """Return an uploaded detector and its calibration; raises ApiError if it is invalid.

    ``name`` is only used to refuse pickles; ``head_text`` is None if the head is in the file's metadata.
    """
    refuse_pickle(name, data, _ADVICE)
    if not is_safetensors(data):
        raise ApiError(
            ErrorCode.UNSUPPORTED_FORMAT,
            f"The file is not safetensors, by its first bytes {bytes(data[:8])!r}. {_ADVICE}",
            FILE,
        )
    content = read_safetensors(data, ErrorCode.INVALID_DETECTOR)
    text = content.metadata.get(METADATA) if head_text is None else head_text
    if text is None:
        raise invalid(
            "A detector needs its head, as the field `head` of the form or as the metadata `detector` of the "
            'file: {"parts": [{"at": "layers.12.output", "form": "linear"}], "bias": 0.0}.',
            HEAD,
        )
    head = _parse_head(text)
    check_size(content.tensors.values(), max_bytes, FILE)
    parts = [
        part_of(part, tensors, spec, f"parts.{index}")
        for index, (part, tensors) in enumerate(
            zip(head.parts, _by_part(_with_part_names(content.tensors, head), len(head.parts)), strict=True)
        )
    ]
    return detector_of(parts, head.bias, head.link, head.threshold, spec), list(head.calibration)


def check_size(tensors: Iterable[npt.NDArray[Any]], max_bytes: int, param: str) -> None:
    """Raise ApiError ``tensor_too_large`` if tensors have more than ``max_bytes`` in float32."""
    check_bytes(_ITEM_BYTES * sum(tensor.size for tensor in tensors), max_bytes, param)


def check_bytes(num_bytes: int, max_bytes: int, param: str) -> None:
    if num_bytes > max_bytes:
        raise ApiError(
            ErrorCode.TENSOR_TOO_LARGE,
            f"The tensors of a detector may have {max_bytes} bytes in float32, these have {num_bytes}.",
            param,
        )


def _parse_head(text: str) -> DetectorHead:
    body = text.encode("utf-8", "surrogatepass")
    if exceeds_depth(body, _MAX_DEPTH):
        raise ApiError(ErrorCode.JSON_TOO_DEEP, f"A detector's head nests at most {_MAX_DEPTH} deep.", HEAD)
    try:
        return validated(DetectorHead, parse_object(body))
    except ApiError as error:
        param = HEAD if error.param is None else f"{HEAD}.{error.param}"
        raise ApiError(error.code, f"The detector's head: {error.message}", param) from error


def _with_part_names(
    tensors: Mapping[str, npt.NDArray[Any]], head: DetectorHead
) -> Mapping[str, npt.NDArray[Any]]:
    """Return a detector's tensors; the only one of a linear part may be called ``weights``."""
    if list(tensors) == ["weights"] and [part.form for part in head.parts] == ["linear"]:
        return {"parts.0.weights": tensors["weights"]}
    return tensors


def _by_part(
    tensors: Mapping[str, npt.NDArray[Any]], num_parts: int
) -> list[dict[str, npt.NDArray[np.float32]]]:
    """Return the tensors of each part by their names, of tensors called ``parts.N.NAME``; raises ApiError."""
    tensors_by_part: list[dict[str, npt.NDArray[np.float32]]] = [{} for _ in range(num_parts)]
    by_index = {str(index): part for index, part in enumerate(tensors_by_part)}
    for name, tensor in tensors.items():
        prefix, _, suffix = name.partition(".")
        index, _, tensor_name = suffix.partition(".")
        if prefix != "parts" or index not in by_index or not tensor_name:
            raise invalid(
                f"Tensors are named parts.N.weights and so on, N from 0 to {num_parts - 1}; got "
                f"{clip(name)!r}.",
                FILE,
            )
        by_index[index][tensor_name] = tensor
    return tensors_by_part


_WIDENING: Final = 2
"""Bytes of the widest dtype of files over those of float32."""
_TENSORS: Final = tuple(dict.fromkeys(name for names in TENSORS.values() for name in names))


class DetectorForm(Strict):
    name: StoredName
    head: str | None = None
    shared: Literal["true", "false"] = "false"


def upload_bytes(max_tensor_bytes: int, max_bytes: int) -> dict[str, int]:
    """Return the maximum bytes of an upload as a form and as JSON."""
    return {"form_bytes": _WIDENING * max_tensor_bytes + SLACK_BYTES, "json_bytes": max_bytes}


def from_form(spec: ModelSpec, max_bytes: int, form: DetectorForm, name: str, content: bytes) -> NewVersion:
    """Return the uploaded detector to be stored; ``name`` and ``content`` are the file's. Raises ApiError."""
    detector, calibration = read_file(content, name, form.head, spec, max_bytes)
    sha256, shared = hashlib.sha256(content).hexdigest(), form.shared == "true"
    return new_version(detector, calibration, form.name, "safetensors", shared=shared, source_sha256=sha256)


def from_json(spec: ModelSpec, max_bytes: int, value: dict[str, Any]) -> NewVersion:
    """Return the detector of a JSON body, to be stored; raises ApiError."""
    new = validated(NewDetector, value, RequestLimits(max_tensor_bytes=max_bytes))
    tensors = [_arrays_of_part(part, f"parts.{index}") for index, part in enumerate(new.parts)]
    check_size((tensor for part_tensors in tensors for tensor in part_tensors.values()), max_bytes, "parts")
    parts = [
        part_of(part, part_tensors, spec, f"parts.{index}")
        for index, (part, part_tensors) in enumerate(zip(new.parts, tensors, strict=True))
    ]
    detector = detector_of(parts, new.bias, new.link, new.threshold, spec)
    return new_version(detector, new.calibration, new.name, "json", shared=new.shared)


def _arrays_of_part(part: NewPart, param: str) -> dict[str, Any]:
    values = {name: getattr(part, name) for name in _TENSORS}
    return {
        name: array_of(tensor, f"{param}.{name}") for name, tensor in values.items() if tensor is not None
    }
