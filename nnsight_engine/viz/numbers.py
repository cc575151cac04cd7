"""Conversion of plot inputs to float64 arrays: tensors, arrays, lists, and the JSON of responses.

This module does not import torch: tensors are converted by their own methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from api_schemas.tensors import TensorObject
from nnsight_engine.core.dtypes import floats_from_bytes

Array = npt.NDArray[np.float64]

_MAX_QUOTED: Final = 60


class VizError(ValueError):
    """The input is not suitable for the plot; the message names the suitable ones."""


def numbers(value: Any, *, dimensions: int, shape: str) -> Array:
    """Return an array with ``dimensions`` dimensions; surplus leading dimensions of length 1 are dropped.

    ``value`` may be a list of tensors, or of numbers (None becomes NaN); ``shape`` is for the error message.

    Raises:
        VizError: It is not numeric, is empty, or has another number of dimensions.
    """
    array = _array(value)
    while array.ndim > dimensions and array.shape[0] == 1:
        array = array[0]
    if array.ndim != dimensions or not array.size:
        raise VizError(f"numbers of shape {shape} are needed, none empty, got {list(array.shape)}")
    return array


def as_json(value: Any) -> Any:
    """Return an object of ``api_schemas`` as its JSON form, and anything else unchanged."""
    return value.model_dump() if isinstance(value, BaseModel) else value


def result_kind(value: Any) -> str | None:
    """Return the operation of a result in JSON form, such as ``capture``; None for tensors and lists.

    Raises:
        VizError: It is a whole response rather than one result.
    """
    if not isinstance(value, Mapping):
        return None
    if "results" in value or "interventions" in value:
        raise VizError(
            "this is a whole answer: take one result from it, choice['interventions']['results'][name]"
        )
    return str(value.get("type", "capture" if "points" in value else "tensor"))


def labels(chosen: Sequence[Any] | None, default: Sequence[Any], what: str) -> list[str]:
    """Return one label for each item of ``default``, or raise VizError; the items if none are given."""
    if chosen is None:
        return [str(label) for label in default]
    if isinstance(chosen, str) or len(chosen) != len(default):
        raise VizError(f"{what} must be a list of {len(default)}, one for each, got {_short(chosen)}")
    return [str(label) for label in chosen]


def shown(token: str) -> str:
    """Return a token as one line with a visible leading space, and ``$`` escaped for matplotlib."""
    text = token.replace("\n", "↵").replace("\t", "⇥").replace("$", r"\$")
    return f"·{text[1:]}" if text.startswith(" ") else text


def _array(value: Any) -> Array:
    """Return numbers in any accepted form as an array of any shape; VizError for other values."""
    value = as_json(value)
    if isinstance(value, Mapping):
        return _decoded(value)
    if hasattr(value, "detach"):  # a tensor, possibly of bfloat16, which numpy lacks
        converted: Array = value.detach().cpu().double().numpy()
        return converted
    if isinstance(value, list | tuple) and any(
        hasattr(item, "detach") or isinstance(item, Mapping | BaseModel) for item in value
    ):
        value = [_array(item) for item in value]
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise VizError(f"numbers are needed, in rows of one length, got {_short(value)}: {error}") from error


def _decoded(value: Mapping[str, Any]) -> Array:
    """Return the numbers of a tensor object in JSON form; VizError if they are in a file, or invalid."""
    if "url" in value:
        raise VizError(
            f"this tensor is in a file on the server: download {value['url']}, read it with safetensors "
            f"and pass its tensor {value.get('key')!r}"
        )
    try:
        tensor = TensorObject.model_validate(dict(value))
    except ValidationError as error:
        raise VizError(f"a tensor object has dtype, shape, data: {error}") from error
    flat = (
        np.frombuffer(tensor.raw, "<i8")
        if tensor.dtype == "int64"
        else floats_from_bytes(tensor.dtype, tensor.raw)
    )
    return flat.astype(np.float64).reshape(tensor.shape)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
