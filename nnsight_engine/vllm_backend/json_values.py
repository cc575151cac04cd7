"""Conversion of saved values to JSON types with tensors in place, in the worker.

No code of an untrusted value runs: types are compared by identity, and those with a metaclass of their own
are refused first, since it could define their hash and name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

_PASSED_THROUGH: Final = frozenset({type(None), bool})
_LISTS: Final = frozenset({list, tuple, set, frozenset, torch.Size})
_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_NAMES: Final = frozenset({torch.dtype, torch.device})
_METACLASSES: Final = (type, *{type(tensor_type) for tensor_type in _TENSORS})
_NUMPY_NUMBERS: Final = frozenset(np.dtype(code).type for code in "?" + np.typecodes["AllInteger"] + "efdg")
_NUMPY_KINDS: Final = {
    "b": "booleans", "i": "integers", "u": "integers", "f": "numbers", "c": "complex numbers",
    "O": "objects", "S": "bytes", "U": "text", "V": "records", "M": "dates", "m": "time spans",
}  # fmt: skip
_MAX_DEPTH: Final = 32
_MAX_VALUES: Final = 100_000
_MAX_ALL_VALUES: Final = 1_000_000
_MAX_INTEGER_BITS: Final = 1024


class NotPlainError(TypeError):
    pass


class _UnfitError(Exception):
    pass


class SaveBudget:
    """The size that saved variables may have as JSON; an object saved several times counts each time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._num_bytes_left = max_bytes
        self._num_values = self._num_before = 0

    def begin_variable(self) -> None:
        self._num_before = self._num_values

    def take_value(self) -> None:
        self._num_values += 1
        if self._num_values - self._num_before > _MAX_VALUES:
            raise _UnfitError(f"it holds more than {_MAX_VALUES:,} values; make a tensor of them")
        if self._num_values > _MAX_ALL_VALUES:
            raise _UnfitError(
                f"all variables together hold more than {_MAX_ALL_VALUES:,} values; make tensors of them"
            )

    def take_bytes(self, num_bytes: int) -> None:
        self._num_bytes_left -= num_bytes
        if self._num_bytes_left < 0:
            raise _UnfitError(
                f"all variables together hold more than {self._max_bytes:,} bytes, counting an object each "
                "time that it is saved; save it once"
            )


def plain_saves(
    saves: Mapping[str, Any],
    tensor: Callable[[torch.Tensor], Any],
    budget: SaveBudget,
    known: frozenset[type] = frozenset(),
) -> dict[str, Any]:
    """Return the saved values as JSON types: tensors converted by ``tensor``, ``known`` types as they are.

    Raises:
        NotPlainError: A variable has a value of another type, or is too large.
    """
    plain = {}
    walk = _Walk(tensor, budget, known)
    for name, value in saves.items():
        budget.begin_variable()
        try:
            plain[name] = walk.plain(value, _MAX_DEPTH)
        except _UnfitError as error:
            raise NotPlainError(
                f"`{name}` was saved and cannot be answered with: {error}. Save tensors, numbers, strings, "
                "None, and lists and dicts of them."
            ) from error
    return plain


class _Walk:
    def __init__(
        self, tensor: Callable[[torch.Tensor], Any], budget: SaveBudget, known: frozenset[type]
    ) -> None:
        self._tensor = tensor
        self._budget = budget
        self._known = known
        # Another metaclass may run code of its own when a type is hashed or named.
        self._metaclasses = (*_METACLASSES, *map(type, known))

    def plain(self, value: Any, depth: int) -> Any:
        """Return a value as JSON types; lists and dicts in it may be ``depth`` deep."""
        self._budget.take_value()
        if not depth:
            raise _UnfitError(f"it is more than {_MAX_DEPTH} lists and dicts deep")
        kind = type(value)
        if not any(type(kind) is metaclass for metaclass in self._metaclasses):
            raise _UnfitError(f"it holds a value of type {_name_of(kind)}")
        if kind in _LISTS:
            return [self.plain(item, depth - 1) for item in value]
        if kind is dict:
            return self._plain_dict(value, depth)
        if kind in _TENSORS:
            return self._plain_tensor(value)
        if issubclass(kind, np.ndarray | np.generic):
            return self._plain_array(value)
        return self._plain_scalar(value)

    def _plain_scalar(self, value: Any) -> Any:
        if type(value) is str:
            self._budget.take_bytes(len(value))
        return _scalar(value, self._known)

    def _plain_dict(self, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        self._budget.take_bytes(sum(len(key) for key in value if type(key) is str))
        plain = {_key(key): self.plain(item, depth - 1) for key, item in value.items()}
        if len(plain) != len(value):
            raise _UnfitError("it holds a dict with a number and its digits as keys, which are one in JSON")
        return plain

    def _plain_tensor(self, value: torch.Tensor) -> Any:
        # Small integers are sent as 64-bit ones.
        self._budget.take_bytes(value.numel() * (value.element_size() if value.is_floating_point() else 8))
        try:
            return self._tensor(value)
        except ValueError as error:
            raise _UnfitError(str(error)) from error

    def _plain_array(self, value: Any) -> Any:
        kind = type(value)
        if kind in _NUMPY_NUMBERS:
            return _scalar(value.item(), self._known)
        if kind is not np.ndarray:
            raise _UnfitError(f"it holds a value of type {_name_of(kind)}")
        if value.dtype.kind in "biuf":
            return self._plain_tensor(torch.from_numpy(np.ascontiguousarray(value)))
        # The dtype's own text would contain the titles of its fields, which may be any objects.
        raise _UnfitError(f"it holds an array of {_NUMPY_KINDS.get(value.dtype.kind, 'another kind')}")


def _name_of(kind: type) -> str:
    """Return a class's name; a metaclass's ``__name__`` is not read."""
    name: str = type.__dict__["__name__"].__get__(kind)
    return name


def _key(key: Any) -> str:
    if type(key) is str:
        return _text(key)
    if type(key) is int and key.bit_length() <= _MAX_INTEGER_BITS:
        return str(key)
    raise _UnfitError(f"it holds a dict with a key of type {_name_of(type(key))}")


def _scalar(value: Any, known: frozenset[type]) -> Any:
    kind = type(value)
    if kind in _PASSED_THROUGH or kind in known:
        return value
    if kind is str:
        return _text(value)
    if kind is int and value.bit_length() <= _MAX_INTEGER_BITS:
        return value
    if kind is float:
        # JSON has no infinities and no NaN: they become null.
        return value if math.isfinite(value) else None
    if kind in _NAMES:
        return str(value)
    raise _UnfitError(f"it holds a value of type {_name_of(kind)}")


def _text(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode()  # a lone surrogate has no UTF-8 encoding
