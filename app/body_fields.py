"""Bounds the number of values in the fields of a JSON body before anything validates them.

Validation costs by values, not bytes: a megabyte of empty objects takes longer than a hundred of base64.
"""

from __future__ import annotations

import base64
import math
from typing import Any, Final

import msgspec
import numpy as np

from api_schemas.errors import ApiError, ErrorCode

PROMPT: Final = "prompt"
_TENSOR_FIELDS: Final = frozenset({"interventions", "parts", "values", "vectors"})
"""Fields of bodies that are tensors, or have them at any depth."""
_HOLDERS: Final = frozenset({"interventions", "parts"})
"""Those of them that are no tensors, nor objects of them."""
_TENSOR_KEYS: Final = frozenset(
    {"hidden_bias", "hidden_weights", "mean", "scale", "values", "vector", "vectors", "weights"}
)
_MIN_NUMBERS: Final = 1024
"""Lists with fewer numbers are not converted."""
_MAX_RANK: Final = 3


class FieldLimits(msgspec.Struct, frozen=True):
    """Limits on the content of one body; ``max_prompt_ids`` counts all prompts together.

    ``max_objects`` counts objects and lists, and ``max_values`` the items in all of them, for each field.
    """

    max_depth: int
    max_objects: int
    max_values: int
    max_prompt_ids: int

    @property
    def min_bytes(self) -> int:
        return 2 * min(self.max_objects, self.max_values, self.max_prompt_ids)


def checked(body: dict[str, Any], limits: FieldLimits) -> dict[str, Any]:
    """Convert long lists of numbers to tensor objects, and check the counts; raises ApiError."""
    for name in _TENSOR_FIELDS & body.keys():
        body[name] = _with_tensors(body[name], name, is_tensor=name not in _HOLDERS)
    for name, value in body.items():
        if isinstance(value, dict | list):
            most = limits.max_prompt_ids if name == PROMPT else limits.max_values
            _check_count(name, value, limits.max_objects, most)
    return body


def _check_count(name: str, value: Any, max_objects: int, max_values: int) -> None:
    left, num_objects, num_values = [value], 0, 0
    while left:
        part = left.pop()
        num_objects += 1
        num_values += len(part)
        if num_objects > max_objects:
            raise _too_many(name, "objects and lists", max_objects, "max_field_objects")
        if num_values > max_values:
            setting = "max_prompt_ids" if name == PROMPT else "max_field_values"
            raise _too_many(name, "values", max_values, setting)
        inner = part.values() if isinstance(part, dict) else part
        left += [one for one in inner if isinstance(one, dict | list)]


def _too_many(name: str, what: str, most: int, setting: str) -> ApiError:
    return ApiError(
        ErrorCode.INVALID_VALUE,
        f"One field of a request may hold {most} {what} ({setting}), and this one holds more; send less in "
        "it.",
        name,
    )


def _with_tensors(value: Any, path: str, *, is_tensor: bool) -> Any:
    """Recursion is bounded by the depth of a body, which is checked before."""
    if isinstance(value, dict):
        inner = value.items()
        are_named = is_tensor and path == "vectors"
        return {
            key: _with_tensors(one, f"{path}.{key}", is_tensor=are_named or key in _TENSOR_KEYS)
            for key, one in inner
        }
    if not isinstance(value, list):
        return value
    if is_tensor:
        return _as_tensor(value, path)
    return [_with_tensors(one, f"{path}.{index}", is_tensor=False) for index, one in enumerate(value)]


def _as_tensor(value: list[Any], path: str) -> Any:
    """Return numbers, nested up to three deep, as a float32 tensor object; others are unchanged."""
    shape, rows = [len(value)], [value]
    while len(shape) < _MAX_RANK and {type(one) for row in rows for one in row} == {list}:
        rows = [one for row in rows for one in row]
        lengths = set(map(len, rows))
        if len(lengths) != 1:
            return value
        shape += lengths
    if math.prod(shape) < _MIN_NUMBERS:
        return value
    kinds = {type(one) for row in rows for one in row}
    if not kinds <= {float, int}:
        raise ApiError(
            ErrorCode.INVALID_VALUE, "A tensor is a list of numbers, or of lists of them, three deep.", path
        )
    try:
        with np.errstate(over="ignore"):
            numbers = np.array(rows, dtype=np.float64).astype("<f4")
    except OverflowError:  # an integer too large for a float
        numbers = np.full(1, np.inf)
    if not np.isfinite(numbers).all():
        raise ApiError(ErrorCode.NOT_FINITE, "Numbers must be finite, in float32 too.", path)
    data = base64.b64encode(numbers.tobytes()).decode("ascii")
    return {"dtype": "float32", "shape": shape, "data": data, "encoding": "base64"}


__all__ = ["FieldLimits", "checked"]
