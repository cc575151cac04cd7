"""Parts of a detector, checked against the model: the only way from received numbers to a ``Detector``.

Each part then reads one point of the model, at a place of its own, whose value is ``[width]`` floats; every
tensor has the shape of its form, of numbers up to ``LARGEST_WEIGHT`` in size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from api_schemas.detectors import MAX_HIDDEN, DetectorPart, PartHead, RocPoint
from api_schemas.errors import ApiError, ErrorCode, clip
from nnsight_engine.core.detector import TENSORS, Detector, Form, Link, Numbers
from nnsight_engine.core.detector import DetectorPart as Part
from nnsight_engine.core.dtypes import LARGEST, LARGEST_WEIGHT
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.compile.scope import canonical_site, leaf_of, resolve_sites
from nnsight_engine.plans.request_plan import PlannedSite

_READ: Final = "probe"
"""The operation that takes the points that a detector may read."""
_OPTIONAL: Final[Mapping[str, float]] = {"hidden_bias": 0.0, "scale": 1.0}
"""Tensors that may be absent, and the number that they then consist of."""
_MAX_SHOWN: Final = 8


def point_of(at: str, spec: ModelSpec, param: str) -> tuple[str, int]:
    """Return the full name of ``layers.12.output`` or ``layers.-1.output``, and its width.

    Raises:
        ApiError: ``unknown_point``, ``unknown_layer``, ``unsupported_at_point``; ``invalid_detector``: many.
    """
    sites = resolve_sites(at, _READ, spec, param)
    if len(sites) > 1 or sites[0].is_in_encoder:
        why = "several" if len(sites) > 1 else "one with a row for each patch of an image"
        raise invalid(
            f"A part of a detector reads one point with a value for each position; {clip(at)!r} is {why}. "
            "Give a part for each point.",
            param,
        )
    return str(sites[0]), leaf_of(sites[0], spec).width


def part_of(head: PartHead, tensors: Mapping[str, npt.NDArray[Any]], spec: ModelSpec, param: str) -> Part:
    """Return a part from its tensors by name, of any float dtype.

    Raises ApiError as ``point_of``; ``invalid_detector``, ``wrong_width``, ``not_finite``.
    """
    point, width = point_of(head.at, spec, f"{param}.at")
    form = Form(head.form)
    names = TENSORS[form]
    extra = next((name for name in tensors if name not in names), None)
    if extra is not None:
        raise invalid(
            f"A part of the form `{form}` has the tensors {', '.join(names)}; got {clip(extra)!r}.", param
        )
    missing = next((name for name in names if name not in tensors and name not in _OPTIONAL), None)
    if missing is not None:
        raise invalid(f"A part of the form `{form}` needs the tensor `{missing}`.", f"{param}.{missing}")
    hidden = _num_hidden(tensors, param) if form is Form.MLP else 0
    checked = {
        name: _checked_numbers(
            tensors.get(name), _expected_shape(form, name, width, hidden), name, point, param
        )
        for name in names
    }
    return Part(point, form, checked)


def _num_hidden(tensors: Mapping[str, npt.NDArray[Any]], param: str) -> int:
    shape = tensors["hidden_weights"].shape
    if len(shape) != len(("hidden", "width")) or not 1 <= shape[0] <= MAX_HIDDEN:
        raise ApiError(
            ErrorCode.WRONG_WIDTH,
            f"`hidden_weights` must be [hidden, width] with 1 to {MAX_HIDDEN} hidden units; got "
            f"{list(shape)[:_MAX_SHOWN]}.",
            f"{param}.hidden_weights",
        )
    return int(shape[0])


def _expected_shape(form: Form, name: str, width: int, hidden: int) -> tuple[int, ...]:
    if form is not Form.MLP:
        return (width,)
    return (hidden, width) if name == "hidden_weights" else (hidden,)


def _checked_numbers(
    tensor: npt.NDArray[Any] | None, shape: tuple[int, ...], name: str, point: str, param: str
) -> Numbers:
    """Return a tensor in float32, its default if it is missing; ApiError for a wrong shape or number."""
    if tensor is None:
        return np.full(shape, _OPTIONAL[name], np.float32)
    if tensor.shape != shape:
        raise ApiError(
            ErrorCode.WRONG_WIDTH,
            f"`{name}` of the part at {point} must be {list(shape)}, got {list(tensor.shape)[:_MAX_SHOWN]}; "
            "GET /v1/capabilities lists the widths.",
            f"{param}.{name}",
        )
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = tensor.astype(np.float32)
    if not (np.abs(numbers) <= LARGEST_WEIGHT).all():  # an infinite number is larger, and NaN is not smaller
        raise ApiError(
            ErrorCode.NOT_FINITE,
            f"Every number must be finite, and at most {LARGEST_WEIGHT:g} in size, so that scores are finite "
            f"in float32; `{name}` of the part at {point} has others.",
            f"{param}.{name}",
        )
    return numbers


def detector_of(
    parts: Sequence[Part], bias: float, link: str, threshold: float | None, spec: ModelSpec
) -> Detector:
    """Return a detector of checked parts.

    Raises ApiError ``invalid_detector``: two parts read one place; ``not_finite``: beyond float32.
    """
    points_by_site: dict[PlannedSite, str] = {}
    for part in parts:
        (site,) = resolve_sites(part.point, _READ, spec, "parts")
        canonical = canonical_site(site)
        if canonical in points_by_site:
            other_name = (
                "" if points_by_site[canonical] == part.point else f", which is {points_by_site[canonical]}"
            )
            raise invalid(f"Parts read different places; two read {part.point}{other_name}.", "parts")
        points_by_site[canonical] = part.point
    for name, number in (("bias", bias), ("threshold", threshold)):
        if number is not None and abs(number) > LARGEST["float32"]:
            raise ApiError(ErrorCode.NOT_FINITE, f"`{name}` must be finite in float32, got {number:g}.", name)
    return Detector(tuple(parts), bias, Link(link), threshold)


def check_fit(detector: Detector, spec: ModelSpec) -> None:
    """Raise ApiError if the model lacks a point of a detector, or has it in another width."""
    for part in detector.parts:
        _, width = point_of(part.point, spec, "parts")
        if width != width_of(part):
            raise ApiError(
                ErrorCode.WRONG_WIDTH, f"{part.point} has the width {width}, not {width_of(part)}.", "parts"
            )


def width_of(part: Part) -> int:
    return int(part.tensors[TENSORS[part.form][0]].shape[-1])


def description_of(detector: Detector, calibration: Sequence[RocPoint]) -> dict[str, Any]:
    """Return the fields of ``api_schemas.detectors.Detector`` that describe the numbers, as JSON values."""
    parts = [
        DetectorPart(
            at=part.point,
            form=part.form.value,
            width=width_of(part),
            hidden=len(part.tensors["hidden_bias"]) if part.form is Form.MLP else None,
        )
        for part in detector.parts
    ]
    return {
        "parts": [part.model_dump() for part in parts],
        "bias": detector.bias,
        "link": detector.link.value,
        "threshold": detector.threshold,
        "calibration": [point.model_dump() for point in calibration],
    }


def invalid(message: str, param: str | None) -> ApiError:
    return ApiError(ErrorCode.INVALID_DETECTOR, message, param)
