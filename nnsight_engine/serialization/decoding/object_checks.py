"""Checks of the objects that a message of data only may make; each raises a ``DecodeError``.

Constructors, hashes and destructors of harmless classes still run C code on data of the sender's choice:
hashing deep tuples or freeing long chains overflows the C stack, colliding keys or huge integers take hours,
and many objects that copy one shared container take far more memory than was sent. So each class is made only
from the arguments that ``encode`` writes for it, and what is copied is bounded by the size of the message.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import pathlib
import types
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.serialization.errors import DecodeError
from nnsight_engine.serialization.limits import is_model_output

if TYPE_CHECKING:
    from nnsight_engine.serialization.decoding.decoder import Decoder

_FORMS: Final[dict[type, tuple[int, tuple[type, ...]]]] = {
    datetime.date: (1, (bytes,)),
    datetime.datetime: (1, (bytes, datetime.timezone)),
    datetime.time: (1, (bytes, datetime.timezone)),
    datetime.timedelta: (3, (int, int, int)),
    datetime.timezone: (1, (datetime.timedelta, str)),
    decimal.Decimal: (1, (str,)),
    collections.Counter: (0, (dict,)),
    collections.OrderedDict: (0, ()),
    collections.defaultdict: (0, (type,)),
    types.SimpleNamespace: (0, ()),
}
"""Classes of the standard library: number of required arguments, and the types of all of them."""
_PATHS: Final = (
    pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.WindowsPath,
)  # fmt: skip
_WITH_ATTRIBUTES: Final = (collections.Counter, collections.OrderedDict, types.SimpleNamespace)
_ARGUMENTS: Final = (type(None), bool, int, float, str, bytes, tuple, list, dict, type)
"""Argument types of other classes, those that a reader allows in addition."""
_SHALLOW_HASHES: Final[tuple[Any, ...]] = (object.__hash__, tuple.__hash__)
_TEXT_PER_ITEM: Final = 64
"""Characters that count as one copied item."""
_COPIES: Final = "copied items"


def check_new(decoder: Decoder, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Refuse to make an uninitialised instance unless ``encode`` writes such instances of the class."""
    _check_class(kind)
    is_called = kind in _FORMS or kind in _PATHS or _is_named_result(kind) or issubclass(kind, enum.Enum)
    if is_called or kwargs or (args and (kind is uuid.UUID or _is_transformers(kind))):
        raise DecodeError(f"the message gives {kind.__qualname__} arguments that it is never made from")
    _charge(decoder, args)


def check_call(decoder: Decoder, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Refuse calls other than those that ``encode`` writes for instances of a class."""
    if not isinstance(value, type):
        raise DecodeError(
            f"the message asks to call a {type(value).__name__}, which a message may not do here"
        )
    _check_class(value)
    if _is_transformers(value) and not is_model_output(value):
        raise DecodeError(f"the message asks to call {value.__qualname__}, which a message may not do here")
    if kwargs or not _are_its_arguments(value, args):
        raise DecodeError(f"the message gives {value.__qualname__} arguments that it is never made from")
    _charge(decoder, args)


def _check_class(kind: type) -> None:
    if has_kind(kind):
        raise DecodeError(f"the message asks to call {kind.__name__}, which a message may not do here")


def has_kind(value: type) -> bool:
    return value.__module__ == "builtins" or issubclass(value, torch.Tensor)


def _are_its_arguments(kind: type, args: tuple[Any, ...]) -> bool:
    if is_model_output(kind):
        return True
    if _is_named_result(kind):
        # A list would hide its depth, and long chains of named results are freed by recursion.
        return len(args) == 2 and type(args[0]) is tuple and args[1] == {}
    if kind in _PATHS:
        return all(type(arg) is str for arg in args)
    if kind in _FORMS:
        num_required, types_ = _FORMS[kind]
        return num_required <= len(args) <= len(types_) and all(
            type(arg) is wanted or (wanted is type and (arg is None or isinstance(arg, type)))
            for arg, wanted in zip(args, types_, strict=False)
        )
    return (
        kind is not uuid.UUID
        and not issubclass(kind, enum.Enum)
        and all(isinstance(arg, _ARGUMENTS) for arg in args)
    )


def check_made(decoder: Decoder, index: int, kind: type, args: tuple[Any, ...], value: Any) -> None:
    """Record the work of hashing an object; refuse it if it has another class than the one named."""
    if type(value) is not kind:
        raise DecodeError(f"the message makes a {type(value).__name__} of {kind.__qualname__}")
    if kind in _FORMS or kind in _PATHS:
        num_characters = sum(len(arg) for arg in args if isinstance(arg, str))
        decoder.work[index] = decoder.work.get(index, 1) + num_characters // 8
    elif kind is not uuid.UUID and not _is_named_result(kind) and kind.__hash__ not in _SHALLOW_HASHES:
        decoder.work[index] = decoder.limits.max_key_work + 1  # its hash may visit state of any depth


def check_filling(decoder: Decoder, value: Any, parts: Sequence[Any]) -> None:
    """Refuse state and items that ``encode`` does not write for the class, and excessive copies."""
    state, slots, items, pairs = parts
    kind = type(value)
    is_fixed = kind in _PATHS or _is_named_result(kind) or (kind in _FORMS and kind not in _WITH_ATTRIBUTES)
    if is_fixed and (state is not None or slots is not None):
        raise DecodeError(f"the message sets attributes of a {kind.__qualname__}, which has none")
    if kind is uuid.UUID:
        _check_uuid(state, slots)
    for names in (state, slots):
        for name in names if isinstance(names, dict) else ():
            if type(name) is not str or (name.startswith("__") and name.endswith("__")):
                raise DecodeError(f"the message sets the attribute {name!r}, which no data has")
    _charge(decoder, [part for part in (state, slots, items, pairs) if part is not None])


def _check_uuid(state: Any, slots: Any) -> None:
    known = isinstance(state, dict) and state.keys() <= {"int", "is_safe"} and slots is None
    if not known or any(type(number) is not int for number in state.values()):
        raise DecodeError("the message is broken: a UUID is not one number")


def check_member(value: Any) -> None:
    """Refuse values of enum members whose hash could be deep: anything but numbers and text."""
    if not isinstance(value, type(None) | bool | int | float | str):
        raise DecodeError(f"a member of an enum has a {type(value).__name__} as its value")


def _is_transformers(kind: type) -> bool:
    return kind.__module__.startswith("transformers.")


def _is_named_result(kind: type) -> bool:
    return kind.__module__ == "torch.return_types"


def _charge(decoder: Decoder, parts: Sequence[Any]) -> None:
    """Count items that are copied; a message may copy as many as it has, but not one container many times."""
    left = decoder.state.get(_COPIES)
    if left is None:
        left = decoder.num_sent(_TEXT_PER_ITEM)
    left -= sum(_num_items(part) for part in parts)
    if left < 0:
        raise DecodeError("the message has objects that would copy more than was sent")
    decoder.state[_COPIES] = left


def _num_items(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value) // _TEXT_PER_ITEM
    return len(value) if isinstance(value, dict | list | tuple) else 0


__all__ = ["check_call", "check_filling", "check_made", "check_member", "check_new", "has_kind"]
