"""Makers of plain data and of objects, called with parts from an untrusted sender.

Sizes are checked before memory is allocated, and hashes before a table is filled. A wrong type raises an
exception, which the decoder converts to a ``DecodeError``.

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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.serialization.decoding.decoder import Decoder, Maker
from nnsight_engine.serialization.limits import DecodeError, is_model_output
from nnsight_engine.serialization.message import DTYPES, NodeKind, array_of, tensor_of

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


_CHECKED_FROM = 64
"""Number of keys from which on their hashes are checked for collisions."""


def _constant(value: Any) -> Maker:
    return Maker(lambda _decoder, _index, _parts: value, num_first=0)


def _scalar(convert: Callable[[Any], Any]) -> Maker:
    return Maker(lambda decoder, index, _parts: convert(decoder.payload(index)), num_first=0)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise DecodeError(f"the message is broken: {kind.__name__} is wanted, not {type(value).__name__}")
    return value


def _nested(make: Callable[[list[Any]], Any]) -> Maker:
    def made(decoder: Decoder, index: int, parts: list[Any]) -> Any:
        _record_depth(decoder, index)
        if decoder.kind(index) == NodeKind.FROZENSET:
            _check_keys(decoder, parts, decoder.children(index))
        return make(parts)

    return Maker(made)


def _record_depth(decoder: Decoder, index: int) -> None:
    """Record the depth and hashing work of an immutable node; hashing and freeing take C stack by depth."""
    depths = decoder.depths
    children = decoder.children(index)
    depths[index] = depth = 1 + max((depths.get(child, 0) for child in children), default=0)
    work = 1 + sum(decoder.work.get(child, 1) for child in children)
    decoder.work[index] = min(work, decoder.limits.max_key_work + 1)  # the work doubles with each (t, t)
    if depth > decoder.limits.max_key_depth and decoder.kind(index) not in {
        NodeKind.TUPLE,
        NodeKind.FROZENSET,
    }:
        raise DecodeError(f"an object is {depth} others deep and may be {decoder.limits.max_key_depth}")


def _check_keys(decoder: Decoder, keys: list[Any], nodes: Sequence[int]) -> None:
    """Refuse keys that would take too much stack or time to hash."""
    if decoder.depths:
        depth = max((decoder.depths.get(node, 0) for node in nodes), default=0)
        if depth > decoder.limits.max_key_depth:
            raise DecodeError(f"a key is {depth} tuples deep and may be {decoder.limits.max_key_depth}")
    if decoder.work and sum(decoder.work.get(node, 0) for node in nodes) > decoder.limits.max_key_work:
        raise DecodeError(f"to hash the keys takes more than {decoder.limits.max_key_work:,} steps")
    if len(keys) >= _CHECKED_FROM:
        _, most = collections.Counter(map(hash, keys)).most_common(1)[0]
        if most > decoder.limits.max_equal_hashes:
            raise DecodeError(f"{most:,} keys have the same hash; {decoder.limits.max_equal_hashes:,} may")


def _fill_list(_decoder: Decoder, value: list[Any], parts: list[Any]) -> None:
    value.extend(parts)


def _make_dict(decoder: Decoder, index: int, _parts: list[Any]) -> dict[Any, Any]:
    value: dict[Any, Any] = {}
    _record_keys(decoder, index, value)
    return value


def _make_set(decoder: Decoder, index: int, _parts: list[Any]) -> set[Any]:
    value: set[Any] = set()
    _record_keys(decoder, index, value)
    return value


def _record_keys(decoder: Decoder, index: int, value: Any) -> None:
    # To find the depths of the keys' nodes; the decoder keeps the value alive, so its id is not reused.
    decoder.state[id(value)] = index


def _fill_dict(decoder: Decoder, value: dict[Any, Any], parts: list[Any]) -> None:
    keys = parts[::2]
    if len(parts) % 2:
        raise DecodeError("the message is broken: a key has no value")
    _check_keys(decoder, keys, decoder.children(decoder.state[id(value)])[::2])
    value.update(zip(keys, parts[1::2], strict=True))


def _fill_set(decoder: Decoder, value: set[Any], parts: list[Any]) -> None:
    _check_keys(decoder, parts, decoder.children(decoder.state[id(value)]))
    value.update(parts)


def _big_int(decoder: Decoder, index: int, _parts: list[Any]) -> int:
    data = decoder.payload(index)
    decoder.work[index] = 1 + len(data) // 8
    return int.from_bytes(data, "little", signed=True)


def _complex(_decoder: Decoder, _index: int, parts: list[Any]) -> complex:
    real, imag = parts
    return complex(_typed(real, float), _typed(imag, float))


def _range(decoder: Decoder, index: int, parts: list[Any]) -> range:
    _record_depth(decoder, index)
    start, stop, step = (_typed(part, int) for part in parts)
    return range(start, stop, step)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise DecodeError(f"this side's torch has no type {name!r}")
    return DTYPES[name]


def _make_tensor(decoder: Decoder, _index: int, parts: list[Any]) -> torch.Tensor:
    name, dtype, shape, device, requires_grad, role = parts
    where = torch.device("meta") if _typed(device, torch.device).type == "meta" else decoder.device
    segment = None if name is None else decoder.tensors[_typed(name, str)]
    sizes = tuple(_typed(size, int) for size in _typed(shape, tuple))
    tensor = tensor_of(segment, _typed(dtype, torch.dtype), sizes, where)
    if role == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=_typed(requires_grad, bool))
    if role in {"buffer", "passing buffer"}:
        tensor = torch.nn.Buffer(tensor, persistent=role == "buffer")
    return tensor.requires_grad_(_typed(requires_grad, bool))


def _fill_tensor(decoder: Decoder, value: torch.Tensor, parts: list[Any]) -> None:
    (gradient,) = parts
    if gradient is None:
        return
    # Freeing a long chain of gradients of gradients would overflow the stack.
    if gradient.grad is not None or ("gradient", id(value)) in decoder.state:
        raise DecodeError("a tensor's gradient has a gradient, which cannot travel")
    decoder.state["gradient", id(gradient)] = True
    value.grad = gradient


def _array(decoder: Decoder, index: int, parts: list[Any]) -> Any:
    name, dtype, shape = parts
    segment = None if name is None else decoder.tensors[_typed(name, str)]
    sizes = tuple(_typed(size, int) for size in _typed(shape, tuple))
    array = array_of(segment, _typed(dtype, str), sizes)
    return array[()] if decoder.kind(index) == NodeKind.SCALAR else array


def _name(payload: str) -> tuple[str, str]:
    module, _, name = payload.partition(":")
    if not name:
        raise DecodeError("the message is broken: a name has no module")
    return module, name


def _make_name(decoder: Decoder, index: int, _parts: list[Any]) -> Any:
    return decoder.import_name(*_name(decoder.payload(index)))


def _make_module(decoder: Decoder, index: int, _parts: list[Any]) -> Any:
    return decoder.import_name(decoder.payload(index), "")


def _make_new(decoder: Decoder, index: int, parts: list[Any]) -> Any:
    _record_depth(decoder, index)
    kind, args, kwargs = parts
    if not isinstance(kind, type):
        raise DecodeError("the message is broken: an object's class is none")
    args = _typed(args, tuple)
    if decoder.policy.allow_source:
        return kind.__new__(kind, *args, **(kwargs or {}))
    check_new(decoder, kind, args, kwargs)
    made = kind.__new__(kind, *args)
    check_made(decoder, index, kind, args, made)
    return made


def _make_call(decoder: Decoder, index: int, parts: list[Any]) -> Any:
    _record_depth(decoder, index)
    function, args, kwargs = parts
    args = _typed(args, tuple)
    if decoder.policy.allow_source and callable(function):
        return function(*args, **(kwargs or {}))
    check_call(decoder, function, args, kwargs)
    made = function(*args)
    check_made(decoder, index, function, args, made)
    return made


def _fill_object(decoder: Decoder, value: Any, parts: list[Any]) -> None:
    state, slots, items, pairs = parts
    if not decoder.policy.allow_source:
        check_filling(decoder, value, parts)
    if items is not None:
        value.extend(_typed(items, list))
    if pairs is not None:
        for name, item in _typed(pairs, dict).items():
            value[name] = item
    _set_state(value, state, slots)


def _set_state(value: Any, state: Any, slots: dict[str, Any] | None) -> None:
    restore = getattr(value, "__setstate__", None)
    if state is not None and restore is not None:
        restore(state)
    elif state is not None:
        vars(value).update(_typed(state, dict))
    for name, item in ({} if slots is None else _typed(slots, dict)).items():
        object.__setattr__(value, name, item)


def _enum_member(decoder: Decoder, _index: int, parts: list[Any]) -> Any:
    kind, value = parts
    if not isinstance(kind, enum.EnumMeta):
        raise DecodeError("the message is broken: a member's class is no enum")
    if not decoder.policy.allow_source:
        check_member(value)
    return kind(value)


def _reference(decoder: Decoder, _index: int, parts: list[Any]) -> Any:
    if decoder.resolve is None:
        raise DecodeError("the message refers to something of this side, which it cannot resolve here")
    return decoder.resolve(tuple(_typed(part, str) for part in parts))


DATA_MAKERS: dict[NodeKind, Maker] = {
    NodeKind.ELLIPSIS: _constant(...),
    NodeKind.NOT_IMPLEMENTED: _constant(NotImplemented),
    NodeKind.BIG_INT: Maker(_big_int, num_first=0),
    NodeKind.COMPLEX: Maker(_complex),
    NodeKind.ODD_STR: _scalar(lambda data: data.decode("utf-8", "surrogatepass")),
    NodeKind.BYTEARRAY: _scalar(bytearray),
    NodeKind.LIST: Maker(lambda _decoder, _index, _parts: [], num_first=0, fill=_fill_list),
    NodeKind.TUPLE: _nested(tuple),
    NodeKind.DICT: Maker(_make_dict, num_first=0, fill=_fill_dict),
    NodeKind.SET: Maker(_make_set, num_first=0, fill=_fill_set),
    NodeKind.FROZENSET: _nested(frozenset),
    NodeKind.SLICE: _nested(lambda parts: slice(*parts)),
    NodeKind.RANGE: Maker(_range),
    NodeKind.ENUM_MEMBER: Maker(_enum_member),
    NodeKind.DTYPE: _scalar(_dtype),
    NodeKind.DEVICE: _scalar(torch.device),
    NodeKind.SIZE: _nested(torch.Size),
    NodeKind.TENSOR: Maker(_make_tensor, num_first=6, fill=_fill_tensor),
    NodeKind.ARRAY: Maker(_array),
    NodeKind.SCALAR: Maker(_array),
    NodeKind.NAME: Maker(_make_name, num_first=0),
    NodeKind.MODULE: Maker(_make_module, num_first=0),
    NodeKind.NEW: Maker(_make_new, num_first=3, fill=_fill_object, copies=True),
    NodeKind.CALL: Maker(_make_call, num_first=3, fill=_fill_object, copies=True),
    NodeKind.REFERENCE: Maker(_reference),
}
