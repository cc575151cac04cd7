"""Default writer of objects by Python's copy protocol; refuses those whose copy would lose behaviour."""

from __future__ import annotations

import _thread
import copyreg
import dataclasses
import enum
import functools
import io
import socket
import threading
import types
import typing
import weakref
from typing import Any

import numpy as np
import torch

from nnsight_engine.serialization.encoding.data import (
    WRITERS,
    write_attributes,
    write_enum,
    write_numpy_scalar,
    write_tensor,
)
from nnsight_engine.serialization.encoding.definitions import CODE_WRITERS, write_class
from nnsight_engine.serialization.encoding.encoder import Encoder, Writer
from nnsight_engine.serialization.message import NodeKind
from nnsight_engine.serialization.source.import_resolution import is_importable, lookup, name_of

_PROTOCOL = 4
_REFUSED: tuple[tuple[tuple[type, ...], str], ...] = (
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


def write(encoder: Encoder, index: int, value: Any) -> None:
    writer = WRITERS.get(type(value)) or CODE_WRITERS.get(type(value))
    if writer is None:
        writer = next((one for kind, one in _BY_BASE if isinstance(value, kind)), _write_object)
    writer(encoder, index, value)


def _write_object(encoder: Encoder, index: int, value: Any) -> None:
    _refuse_what_would_do_less(encoder, index, value)
    special = _SPECIAL.get(type(value))
    if special is not None:
        special(encoder, index, value)
        return
    reducer = copyreg.dispatch_table.get(type(value))
    try:
        reduced = reducer(value) if reducer is not None else value.__reduce_ex__(_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - a user's method may raise anything
        encoder.refuse(
            index, value, f"Python has no copy of it ({error}); send the data that it is made from"
        )
    if isinstance(reduced, str):
        _write_by_name(encoder, index, value, reduced)
    elif isinstance(reduced, tuple) and 2 <= len(reduced) <= 5:
        _write_reduced(encoder, index, value, reduced)
    else:
        encoder.refuse(index, value, "its class says how to copy it in a way that is not known here")


def _write_reduced(encoder: Encoder, index: int, value: Any, reduced: tuple[Any, ...]) -> None:
    function, args, state, items, pairs = (*reduced, None, None, None)[:5]
    kwargs: dict[str, Any] | None = None
    kind = NodeKind.CALL
    if function is copyreg.__newobj__:  # type: ignore[attr-defined] # not in typeshed
        kind, function, args = NodeKind.NEW, args[0], args[1:]
    elif function is copyreg.__newobj_ex__:  # type: ignore[attr-defined] # not in typeshed
        kind, (function, args, kwargs) = NodeKind.NEW, args
    state, slots = _state(value, state)
    attributes = write_attributes if type(state) is dict else None
    encoder.emit(
        index,
        kind,
        [
            encoder.node(function, index, "its class" if kind is NodeKind.NEW else "what makes it"),
            encoder.node(tuple(args), index, "what it is made from"),
            encoder.node(kwargs, index, "what it is made from"),
            encoder.node(state, index, "", writer=attributes),
            encoder.node(slots, index, "", writer=write_attributes if slots is not None else None),
            encoder.node(None if items is None else list(items), index, ""),
            encoder.node(None if pairs is None else dict(pairs), index, ""),
        ],
    )


def _state(value: Any, state: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return an object's state and, separately, its slots' values, unless ``__setstate__`` restores both."""
    if not hasattr(value, "__setstate__") and isinstance(state, tuple) and len(state) == 2:
        return state
    return state, None


def _write_by_name(encoder: Encoder, index: int, value: Any, name: str) -> None:
    found = name_of(value)
    for module in (getattr(value, "__module__", None), "torch"):
        bare = name.removeprefix(f"{module}.")
        if (
            found is None
            and isinstance(module, str)
            and is_importable(module)
            and lookup(module, bare) is value
        ):
            found = (module, bare)
    if found is None:
        encoder.refuse(index, value, f"it is known by the name {name!r} alone, which the other side lacks")
    encoder.emit(index, NodeKind.NAME, payload=":".join(found))


def _write_builtin(encoder: Encoder, index: int, value: Any) -> None:
    found = name_of(value)
    if found is not None:
        encoder.emit(index, NodeKind.NAME, payload=":".join(found))
    else:
        _write_object(encoder, index, value)


def _refuse_what_would_do_less(encoder: Encoder, index: int, value: Any) -> None:
    for kinds, advice in _REFUSED:
        if isinstance(value, kinds):
            encoder.refuse(index, value, advice)
    if isinstance(value, torch.nn.Module):
        for name, hooks in vars(value).items():
            if name.endswith("_hooks") and hooks:
                names = ", ".join(sorted({_called(hook) for hook in hooks.values()}))
                encoder.refuse(
                    index,
                    value,
                    f"it has hooks ({names} in {name}), which would not run there; remove them first",
                )


def _called(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def _call(encoder: Encoder, index: int, function: Any, *args: Any, **kwargs: Any) -> None:
    parts = (function, args, kwargs or None, None, None, None, None)
    encoder.emit(index, NodeKind.CALL, [encoder.node(part, index, "what it is made from") for part in parts])


def _write_lru_cache(encoder: Encoder, index: int, value: Any) -> None:
    if name_of(value) is not None:
        _write_builtin(encoder, index, value)
    else:
        settings = value.cache_parameters()
        _call(encoder, index, functools.partial(functools.lru_cache, **settings)(), value.__wrapped__)


def _write_type_variable(encoder: Encoder, index: int, value: typing.TypeVar) -> None:
    variance = {"covariant": True} if value.__covariant__ else {}
    variance |= {"contravariant": True} if value.__contravariant__ else {}
    constraints, bound = value.__constraints__, value.__bound__
    _call(encoder, index, typing.TypeVar, value.__name__, *constraints, bound=bound, **variance)


def _write_operator(encoder: Encoder, index: int, value: Any) -> None:
    encoder.emit(index, NodeKind.NAME, payload=f"torch:ops.{value!s}")


def _write_proxy(encoder: Encoder, index: int, value: types.MappingProxyType[Any, Any]) -> None:
    _call(encoder, index, types.MappingProxyType, dict(value))


def _write_sentinel(name: str) -> Writer:
    return lambda encoder, index, _: encoder.emit(index, NodeKind.NAME, payload=f"dataclasses:{name}")


_SPECIAL: dict[type, Writer] = {
    type(dataclasses.KW_ONLY): _write_sentinel("KW_ONLY"),
    type(dataclasses.MISSING): _write_sentinel("MISSING"),
    functools._lru_cache_wrapper: _write_lru_cache,  # noqa: SLF001 - the type of functions wrapped by lru_cache
    typing.TypeVar: _write_type_variable,
    types.MappingProxyType: _write_proxy,
    type(torch.ops.aten.add.Tensor): _write_operator,
    type(torch.ops.aten.add): _write_operator,
}


_BY_BASE: tuple[tuple[type, Writer], ...] = (
    (torch.Tensor, write_tensor),
    (type, write_class),
    (enum.Enum, write_enum),
    (np.generic, write_numpy_scalar),
    (types.ModuleType, CODE_WRITERS[types.ModuleType]),
    (types.BuiltinFunctionType, _write_builtin),
    (types.MethodDescriptorType, _write_builtin),
    (np.ufunc, _write_builtin),
)
