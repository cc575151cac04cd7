"""Makers of plain data and of objects, called with parts from an untrusted sender.

Sizes are checked before memory is allocated, and hashes before a table is filled. A wrong type raises an
exception, which the decoder converts to a ``DecodeError``.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nnsight_engine.serialization.decoding.decoder import Decoder, Maker
from nnsight_engine.serialization.decoding.object_checks import (
    check_call,
    check_filling,
    check_made,
    check_member,
    check_new,
)
from nnsight_engine.serialization.errors import DecodeError
from nnsight_engine.serialization.message.node_kinds import NodeKind
from nnsight_engine.serialization.message.tensors import DTYPES, array_of, tensor_of

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
