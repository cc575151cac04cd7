"""Layers of torch that code makes and derives from: how large they are, and what of them is torch's affair.

A layer calls what it finds in its own dicts and in ``forward``, and makes its weights before anybody could
count them. So weights are made on torch's meta device first, where they have a shape alone, and the names by
which a layer keeps its parts are neither read nor set.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Final

import torch

from nnsight_engine.sandbox.restricted.arguments import BY_PLACE, check_torch
from nnsight_engine.sandbox.restricted.budget import FuelMeter, refusal

_HIDDEN: Final = frozenset(
    name
    for name in (*vars(torch.nn.Module()), *dir(torch.nn.Module))
    if name.startswith("_") and not name.startswith("__")
) | {"call_super_init", "dump_patches"}
_DICTS_OF_PARTS: Final[Mapping[str, tuple[type, ...]]] = {
    "_modules": (torch.nn.Module, type(None)),
    "_parameters": (torch.nn.Parameter, type(None)),
    "_buffers": (torch.Tensor, type(None)),
}
_HOLDERS: Final = (
    torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList,
    torch.nn.ParameterDict,
)  # fmt: skip


def is_hidden(kind: type, name: str) -> bool:
    """Tell whether a name in a class of the code's own, or in its objects, is torch's or ``enum``'s."""
    if issubclass(kind, torch.nn.Module):
        return name in _HIDDEN
    return name.startswith("_") and name.endswith("_") and issubclass(kind, enum.Enum)


def check_settable(owner: Any, name: str) -> None:
    """Refuse to set what torch calls, or a sparse gradient, on a layer of the code's own or its class.

    Raises:
        SandboxError: That is what the name is.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    if is_hidden(kind, name):
        raise refusal(f"setting `{name}` of a `{kind.__name__}`")
    if issubclass(kind, torch.nn.Module) and name == "forward":
        raise refusal("setting `forward` of a layer", "define a method in the class")
    if issubclass(kind, torch.nn.Embedding) and name == "sparse":
        raise refusal("a sparse gradient", "leave `sparse` alone")


def check_defined(kind: type) -> None:
    """Refuse a class that hides what torch or ``enum`` keep there, or whose ``forward`` is no function.

    Raises:
        SandboxError: It does.
    """
    for name, value in vars(kind).items():
        if name.startswith("__"):
            continue
        if is_hidden(kind, name) and (issubclass(kind, torch.nn.Module) or _is_written(kind, name)):
            raise refusal(f"`{name}` in the class `{kind.__name__}`")
        is_called = issubclass(kind, torch.nn.Module) and name in {"forward", "extra_repr"}
        if is_called and not isinstance(value, FunctionType):
            raise refusal(f"`{name}` of a layer that is no method", "write `def`")


def _is_written(kind: type, name: str) -> bool:
    """Tell whether a class's body says what ``enum`` otherwise does itself."""
    return isinstance(vars(kind)[name], staticmethod | classmethod) or name in {"_missing_", "_ignore_"}


def charge_layer(meter: FuelMeter, kind: type[torch.nn.Module], args: tuple[Any, ...], kwargs: Any) -> None:
    """Count a layer's weights before they are made.

    Raises:
        Stop: There are not so many bytes left.
    """
    check_torch(kind.__name__, (), kwargs)
    if kind is torch.nn.Embedding and len(args) > BY_PLACE["embedding"]:
        raise refusal("`Embedding` with so many arguments by their places", "give the later ones by name")
    if issubclass(kind, _HOLDERS):
        return
    try:
        shape_only = kind(*args, **{**kwargs, "device": "meta"})
    except TypeError:  # one without weights
        return
    meter.charge(sum(one.numel() * one.element_size() for one in shape_only.parameters()))
    meter.charge(sum(one.numel() * one.element_size() for one in shape_only.buffers()))


def made_by_torch(kind: type) -> type[torch.nn.Module] | None:
    """Return the layer of torch whose ``__init__`` makes a class's objects, if one does."""
    for base in kind.__mro__:
        if "__init__" in vars(base):
            is_layer = base.__module__.startswith("torch.nn.modules.") and base is not torch.nn.Module
            return base if is_layer else None
    return None


def check_layer_state(state: Any) -> None:
    """Look through the state of a layer that came in a message.

    Raises:
        SandboxError: There is something in it that torch would call, or that is no part of a layer.
    """
    if type(state) is not dict:
        raise refusal("a layer whose state is no dict")
    for name, value in state.items():
        kinds = _DICTS_OF_PARTS.get(name)
        if kinds is not None:
            if not isinstance(value, dict) or not all(isinstance(one, kinds) for one in value.values()):
                raise refusal(f"a layer with such `{name}`")
        elif (name in _HIDDEN and isinstance(value, dict) and value) or name == "forward":
            raise refusal(f"a layer with `{name}`", "hooks do not travel")
