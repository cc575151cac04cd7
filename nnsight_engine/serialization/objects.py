"""Kinds of objects: by name, by reference, or by Python's copy protocol.

An object whose copy would lose behaviour is refused. A reader that takes data alone makes only classes of
data, each from arguments and state that are written for it: constructors, hashes and destructors of harmless
classes still run C code on data of the sender's choice. Hashing deep tuples or freeing long chains overflows
the C stack, colliding keys or huge integers take hours, and many objects that copy one shared container take
far more memory than was sent, so what is copied is bounded by the size of the message.
"""

from __future__ import annotations

import _thread
import collections
import copyreg
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib
import io
import operator
import pathlib
import socket
import threading
import types
import typing
import uuid
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.serialization.data import write_attributes
from nnsight_engine.serialization.graph import Decoder, Encoder, Kind, Unsendable, Writer, Written, typed
from nnsight_engine.serialization.limits import DecodeError, is_data_class, is_model_output
from nnsight_engine.serialization.message import NodeKind
from nnsight_engine.serialization.source.import_resolution import MOVED, is_importable, lookup, name_of

# Names and references.


def write_name(value: Any) -> Written | None:
    """Return the node of an object that the other side has under a name; None for others."""
    name = name_of(value)
    return None if name is None else (NodeKind.NAME, ":".join(name))


def _write_builtin(encoder: Encoder, value: Any) -> Written:
    return write_name(value) or write_object(encoder, value)


def import_name(decoder: Decoder, module: str, name: str) -> Any:
    """Return the object; raise a ``DecodeError`` if it is missing or the policy forbids it."""
    module = MOVED.get(module, module)
    if not decoder.policy.may_import(module, name):
        raise DecodeError(
            f"the message asks for {module}.{name}, which this side does not take from a message"
        )
    try:
        current = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module may fail in any way
        raise DecodeError(
            f"the message asks for the module {module}, which cannot be imported here ({error}); install "
            f"it here too, or send it as source with register_by_value{decoder.between_versions}"
        ) from error
    try:
        value = operator.attrgetter(name)(current) if name else current
    except AttributeError as error:
        raise DecodeError(
            f"the message asks for {module}.{name}, which this side's {module} lacks"
            f"{decoder.between_versions}"
        ) from error
    if not decoder.policy.allow_source and not is_data_class(value, module, name):
        raise DecodeError(f"the message asks for {module}.{name}, which is no class of data")
    return value


def _make_name(decoder: Decoder, payload: str) -> Any:
    module, _, name = payload.partition(":")
    if not name:
        raise DecodeError("the message is broken: a name has no module")
    return import_name(decoder, module, name)


def _make_reference(decoder: Decoder, parts: list[Any]) -> Any:
    if decoder.resolve is None:
        raise DecodeError("the message refers to something of this side, which it cannot resolve here")
    return decoder.resolve(tuple(typed(part, str) for part in parts))


# Members of enums, by class and value; the value of a flag may combine several members.


def _write_member(encoder: Encoder, value: enum.Enum) -> Written:
    return NodeKind.ENUM_MEMBER, [
        encoder.node(type(value), "its class"),
        encoder.node(value.value, "its value"),
    ]


def _make_member(decoder: Decoder, parts: list[Any]) -> Any:
    """Return the member of an enum by its value, for a flag also a combination of members."""
    kind, value = parts
    if not isinstance(kind, enum.EnumMeta):
        raise DecodeError("the message is broken: a member's class is no enum")
    # Anything but numbers and text may have a deep hash.
    if not decoder.policy.allow_source and not isinstance(value, type(None) | bool | int | float | str):
        raise DecodeError(f"a member of an enum has a {type(value).__name__} as its value")
    return kind(value)


# Writing of other objects.

_PROTOCOL: Final = 4
_REFUSED: Final[tuple[tuple[tuple[type, ...], str], ...]] = (
    ((io.IOBase,), "open it where it is used, or send what is in it"),
    ((socket.socket,), "open the connection where it is used"),
    (
        (_thread.LockType, _thread.RLock, threading.Event, threading.Condition, threading.Semaphore),
        "it means something in this process alone; make one where it is used",
    ),
    ((threading.Thread,), "it runs in this process; start one where it is used"),
    ((threading.local,), "its values are those of this process's threads; send the values"),
    (
        (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
        "it is in the middle of running; send list(…) of it, or the function that makes it",
    ),
    ((types.FrameType, types.TracebackType, types.CodeType), "send the function, or what it shows as text"),
    ((weakref.ref, weakref.ProxyType, weakref.CallableProxyType), "send what it refers to"),
    ((memoryview,), "send bytes(…) of it"),
    ((torch.Generator,), "its state belongs to a device; send a seed and make one where it is used"),
    ((torch.UntypedStorage, torch.TypedStorage), "send a tensor on it"),
)


def write_object(encoder: Encoder, value: Any) -> Written:
    """Write an object of a class that is in no kind's ``types`` or ``bases``."""
    _refuse_what_would_do_less(value)
    reducer = copyreg.dispatch_table.get(type(value))
    try:
        reduced = reducer(value) if reducer is not None else value.__reduce_ex__(_PROTOCOL)
    except Exception as error:
        raise Unsendable(f"Python has no copy of it ({error}); send the data that it is made from") from error
    if isinstance(reduced, str):
        return _write_by_name(value, reduced)
    if isinstance(reduced, tuple) and 2 <= len(reduced) <= 5:
        return _write_reduced(encoder, value, reduced)
    raise Unsendable("its class says how to copy it in a way that is not known here")


def _refuse_what_would_do_less(value: Any) -> None:
    """Refuse objects whose copy would not work as they do here: open files, running code, hooks."""
    for kinds, advice in _REFUSED:
        if isinstance(value, kinds):
            raise Unsendable(advice)
    if isinstance(value, torch.nn.Module):
        for name, hooks in vars(value).items():
            if name.endswith("_hooks") and hooks:
                called = {
                    str(getattr(hook, "__qualname__", type(hook).__qualname__)) for hook in hooks.values()
                }
                raise Unsendable(
                    f"it has hooks ({', '.join(sorted(called))} in {name}), which would not run there; "
                    "remove them first"
                )


def _write_reduced(encoder: Encoder, value: Any, reduced: tuple[Any, ...]) -> Written:
    """Write what ``__reduce_ex__`` returned: maker, arguments, state, slots, items of lists and of dicts."""
    function, args, state, items, pairs = (*reduced, None, None, None)[:5]
    kwargs: dict[str, Any] | None = None
    kind = NodeKind.CALL
    if function is copyreg.__newobj__:  # type: ignore[attr-defined] # not in typeshed
        kind, function, args = NodeKind.NEW, args[0], args[1:]
    elif function is copyreg.__newobj_ex__:  # type: ignore[attr-defined] # not in typeshed
        kind, (function, args, kwargs) = NodeKind.NEW, args
    slots = None
    if not hasattr(value, "__setstate__") and isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    return kind, [
        encoder.node(function, "its class" if kind is NodeKind.NEW else "what makes it"),
        encoder.node(tuple(args), "what it is made from"),
        encoder.node(kwargs, "what it is made from"),
        encoder.node(state, writer=write_attributes if type(state) is dict else None),
        encoder.node(slots, writer=write_attributes if slots is not None else None),
        encoder.node(None if items is None else list(items)),
        encoder.node(None if pairs is None else dict(pairs)),
    ]


def _write_by_name(value: Any, name: str) -> Written:
    """Write an object for which ``__reduce_ex__`` returned a global name, without its module."""
    location = name_of(value)
    for module in (getattr(value, "__module__", None), "torch"):
        bare = name.removeprefix(f"{module}.")
        if (
            location is None
            and isinstance(module, str)
            and is_importable(module)
            and lookup(module, bare) is value
        ):
            location = (module, bare)
    if location is None:
        raise Unsendable(f"it is known by the name {name!r} alone, which the other side lacks")
    return NodeKind.NAME, ":".join(location)


def _call(encoder: Encoder, function: Any, *args: Any, **kwargs: Any) -> Written:
    parts = (function, args, kwargs or None, None, None, None, None)
    return NodeKind.CALL, encoder.nodes(parts, "what it is made from")


def _write_lru_cache(encoder: Encoder, value: Any) -> Written:
    """Write a cached function by name, or as a call that makes it anew, with an empty cache."""
    settings = value.cache_parameters()
    return write_name(value) or _call(
        encoder, functools.partial(functools.lru_cache, **settings)(), value.__wrapped__
    )


def _write_type_variable(encoder: Encoder, value: typing.TypeVar) -> Written:
    variance = {"covariant": True} if value.__covariant__ else {}
    variance |= {"contravariant": True} if value.__contravariant__ else {}
    constraints, bound = value.__constraints__, value.__bound__
    return _call(encoder, typing.TypeVar, value.__name__, *constraints, bound=bound, **variance)


def _write_proxy(encoder: Encoder, value: types.MappingProxyType[Any, Any]) -> Written:
    return _call(encoder, types.MappingProxyType, dict(value))


def _write_operator(_encoder: Encoder, value: Any) -> Written:
    return NodeKind.NAME, f"torch:ops.{value!s}"


def _write_sentinel(_encoder: Encoder, value: Any) -> Written:
    return NodeKind.NAME, f"dataclasses:{'KW_ONLY' if value is dataclasses.KW_ONLY else 'MISSING'}"


SPECIAL_WRITERS: Final[dict[type, Writer]] = {
    type(dataclasses.KW_ONLY): _write_sentinel,
    type(dataclasses.MISSING): _write_sentinel,
    functools._lru_cache_wrapper: _write_lru_cache,  # noqa: SLF001 - the type of functions wrapped by lru_cache
    typing.TypeVar: _write_type_variable,
    types.MappingProxyType: _write_proxy,
    type(torch.ops.aten.add.Tensor): _write_operator,
    type(torch.ops.aten.add): _write_operator,
}
"""Writers of objects that Python does not copy as they need; exactly these types."""

# Reading of them, by readers that take data alone.

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


def _make_object(decoder: Decoder, parts: list[Any]) -> Any:
    """Make an object by a call or ``__new__``; without code, only data's classes from their arguments."""
    function, args, kwargs = parts
    is_new = decoder.kind == NodeKind.NEW
    if is_new and not isinstance(function, type):
        raise DecodeError("the message is broken: an object's class is none")
    make = functools.partial(function.__new__, function) if is_new else function
    if decoder.policy.allow_source and callable(function):
        return make(*args, **(kwargs or {}))
    if not isinstance(function, type):
        raise DecodeError(
            f"the message asks to call a {type(function).__name__}, which a message may not do here"
        )
    if (
        function.__module__ == "builtins"
        or issubclass(function, torch.Tensor)
        or (not is_new and _is_transformers(function) and not is_model_output(function))
    ):
        raise DecodeError(
            f"the message asks to call {function.__qualname__}, which a message may not do here"
        )
    if kwargs or not (_are_for_new(function, args) if is_new else _are_for_call(function, args)):
        raise DecodeError(f"the message gives {function.__qualname__} arguments that it is never made from")
    _charge(decoder, args)
    instance = make(*args)
    if type(instance) is not function:
        raise DecodeError(f"the message makes a {type(instance).__name__} of {function.__qualname__}")
    _record_work(decoder, function, args)
    return instance


def _are_for_new(kind: type, args: tuple[Any, ...]) -> bool:
    """Return whether uninitialised instances are written of the class, with these arguments."""
    is_called = kind in _FORMS or kind in _PATHS or _is_named_result(kind) or issubclass(kind, enum.Enum)
    return not is_called and not (args and (kind is uuid.UUID or _is_transformers(kind)))


def _are_for_call(kind: type, args: tuple[Any, ...]) -> bool:
    """Return whether objects of the class are written as a call with such arguments."""
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
            type(arg) is expected or (expected is type and (arg is None or isinstance(arg, type)))
            for arg, expected in zip(args, types_, strict=False)
        )
    return (
        kind is not uuid.UUID
        and not issubclass(kind, enum.Enum)
        and all(isinstance(arg, _ARGUMENTS) for arg in args)
    )


def _record_work(decoder: Decoder, kind: type, args: tuple[Any, ...]) -> None:
    """Record the work of hashing an object of the class."""
    work, index = decoder.work, decoder.index
    if kind in _FORMS or kind in _PATHS:
        work[index] = work.get(index, 1) + sum(len(arg) for arg in args if isinstance(arg, str)) // 8
    elif kind is not uuid.UUID and not _is_named_result(kind) and kind.__hash__ not in _SHALLOW_HASHES:
        work[index] = decoder.limits.max_key_work + 1  # its hash may visit state of any depth


def _is_transformers(kind: type) -> bool:
    return kind.__module__.startswith("transformers.")


def _is_named_result(kind: type) -> bool:
    return kind.__module__ == "torch.return_types"


def _charge(decoder: Decoder, parts: Sequence[Any]) -> None:
    """Count items that are copied; a message may copy as many as it has, but not one container many times."""
    num_items = decoder.state.get(_COPIES)
    if num_items is None:
        table = decoder.table
        num_items = len(table.kinds) + sum(map(len, table.children))
        num_items += (
            sum(len(text) for text in table.payloads if isinstance(text, str | bytes)) // _TEXT_PER_ITEM
        )
    num_items -= sum(_num_items(part) for part in parts)
    if num_items < 0:
        raise DecodeError("the message has objects that would copy more than was sent")
    decoder.state[_COPIES] = num_items


def _num_items(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value) // _TEXT_PER_ITEM
    return len(value) if isinstance(value, dict | list | tuple) else 0


def _fill_object(decoder: Decoder, value: Any, parts: list[Any]) -> None:
    """Add an object's items and set its state, as ``copy.copy`` does for what ``_write_reduced`` wrote."""
    state, slots, items, pairs = parts
    if not decoder.policy.allow_source:
        _check_filling(decoder, type(value), parts)
    if items is not None:
        value.extend(typed(items, list))
    if pairs is not None:
        for name, item in typed(pairs, dict).items():
            value[name] = item
    restore = getattr(value, "__setstate__", None)
    if state is not None and restore is not None:
        restore(state)
    elif state is not None:
        vars(value).update(typed(state, dict))
    for name, item in ({} if slots is None else typed(slots, dict)).items():
        object.__setattr__(value, name, item)


def _check_filling(decoder: Decoder, kind: type, parts: Sequence[Any]) -> None:
    """Refuse state and items that are not written of the class, and excessive copies."""
    state, slots, *_ = parts
    is_fixed = kind in _PATHS or _is_named_result(kind) or (kind in _FORMS and kind not in _WITH_ATTRIBUTES)
    if is_fixed and (state is not None or slots is not None):
        raise DecodeError(f"the message sets attributes of a {kind.__qualname__}, which has none")
    if kind is uuid.UUID:
        known = isinstance(state, dict) and state.keys() <= {"int", "is_safe"} and slots is None
        if not known or any(type(number) is not int for number in state.values()):
            raise DecodeError("the message is broken: a UUID is not one number")
    for names in (state, slots):
        for name in names if isinstance(names, dict) else ():
            if type(name) is not str or (name.startswith("__") and name.endswith("__")):
                raise DecodeError(f"the message sets the attribute {name!r}, which no data has")
    _charge(decoder, parts)


def _object(number: NodeKind) -> Kind:
    """Return the kind of objects that are made by a call or by ``__new__``, and filled with their state."""
    return Kind(
        number,
        first=(object, tuple, object),
        make=_make_object,
        fill=_fill_object,
        copies=True,
        is_nested=True,
    )


OBJECT_KINDS: Final = (
    Kind(
        NodeKind.NAME,
        write=_write_builtin,
        bases=(types.BuiltinFunctionType, types.MethodDescriptorType, np.ufunc),
        make=_make_name,
    ),
    Kind(
        NodeKind.ENUM_MEMBER,
        write=_write_member,
        bases=(enum.Enum,),
        first=(object, object),
        make=_make_member,
    ),
    Kind(NodeKind.REFERENCE, make=_make_reference),
    _object(NodeKind.NEW),
    _object(NodeKind.CALL),
)
