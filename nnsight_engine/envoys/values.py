"""Input and output of a call, as properties that wait; and tensors that are their own ``output``.

Scripts also read and assign logits and sampled tokens as the output of a module: ``model.logits`` is a
tensor, and ``model.logits.output`` the same tensor. So ``torch.Tensor`` has an ``output`` that exists only on
tensors that were read as such a value; these keep their class and identity, on which gradients depend.
"""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from nnsight_engine.envoys.eproperty import eproperty, requires_input, requires_output

_HERE_ONLY: Final = (
    "A part of a model runs in this process: leave remote= out, or trace the whole model with it."
)


class CallValues:
    """The values of a call: of a module, or of an operation inside a forward.

    A subclass has an ``interleaver`` and a ``path``, and provides ``<path>.input`` as
    ``(args, kwargs)`` and ``<path>.output``.
    """

    @eproperty(description="output")
    @requires_output
    def output(self) -> Any:
        """The return value of the call; assign to replace it. Waits until the call has returned."""

    @eproperty(key="input", description="inputs")
    @requires_input
    def inputs(self) -> Any:
        """The arguments of the call, ``(args, kwargs)``; assign to replace both."""

    @inputs.postprocess
    def _pair(self, value: Any) -> Any:
        """Return assigned inputs as a tuple and a dict; TypeError if they are no such pair."""
        if not (isinstance(value, tuple | list) and len(value) == 2):
            raise TypeError(
                f"inputs are a pair (args, kwargs), got a {type(value).__name__}; `input` is the first"
            )
        args, kwargs = value
        if not (isinstance(args, tuple | list) and isinstance(kwargs, Mapping)):
            raise TypeError(
                "inputs are a pair (args, kwargs) of a tuple and a dict, "
                f"got {type(args).__name__} and {type(kwargs).__name__}; `input` is the first"
            )
        return tuple(args), dict(kwargs)

    @eproperty(key="input", description="input")
    @requires_input
    def input(self) -> Any:
        """The first argument: the first positional one, else the first by keyword."""

    @input.preprocess
    def _first_argument(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = value
        return args[0] if args else next(iter(kwargs.values()), None)

    @input.postprocess
    def _with_first(self, value: Any) -> Any:
        """Return all arguments with ``value`` as the first, which an assignment to ``input`` replaces."""
        args, kwargs = CallValues.inputs.__get__(self)  # not self.inputs, which may be a module of that name
        if args or not kwargs:
            return (value, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): value}


def names_input(kind: type[torch.nn.Module], names: Collection[str]) -> bool:
    """Return whether these are all required parameters, or the first one if none is required.

    Other keyword arguments apply to every invoke of a trace, as ``model.trace(scale=2)`` does.
    """
    named_parameters = [
        parameter
        for parameter in _parameters(kind)
        if parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]
    required = {parameter.name for parameter in named_parameters if parameter.default is parameter.empty}
    first_name = {parameter.name for parameter in named_parameters[:1]}
    return bool(names) and bool(required or first_name) and (required or first_name) <= set(names)


def named_arguments(kind: type[torch.nn.Module]) -> tuple[frozenset[str], bool]:
    """Return the names of the arguments of a class's forward, and whether it takes any others too."""
    parameters = _parameters(kind)
    takes_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return frozenset(
        parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
    ), takes_others


def _parameters(kind: type[torch.nn.Module]) -> list[inspect.Parameter]:
    return list(inspect.signature(kind.forward).parameters.values())[1:]


def unknown_arguments_error(unknown: Collection[str], known: Collection[str], where: str) -> TypeError:
    name = next(iter(unknown))
    similar = difflib.get_close_matches(name, known, n=1)
    return TypeError(
        f"{where} takes no argument {', '.join(unknown)}"
        + (f"; did you mean {similar[0]}?" if similar else "")
        + (f". {_HERE_ONLY}" if {"remote", "blocking"} & set(unknown) else "")
    )


_NAME: Final = "output"
_OWNERS: Final = WeakTensorKeyDictionary()
"""By tensor: a weak reference to the envoy of the model, and the attribute of it that was read."""


class _OwnOutput:
    def __get__(self, tensor: torch.Tensor | None, owner: type | None = None) -> Any:
        """Return a tensor that was read as a model's value itself; for others, an ordinary attribute."""
        if tensor is None:
            return self
        attributes = tensor.__dict__
        if _NAME in attributes:
            return attributes[_NAME]
        if tensor in _OWNERS:
            return tensor
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {_NAME!r}", name=_NAME)

    def __set__(self, tensor: torch.Tensor, value: Any) -> None:
        """Assign the model's value that a tensor was read as; for others, set an ordinary attribute."""
        if tensor in _OWNERS:
            reference, name = _OWNERS[tensor]
            setattr(reference(), name, value)
        else:
            tensor.__dict__[_NAME] = value

    def __delete__(self, tensor: torch.Tensor) -> None:
        del tensor.__dict__[_NAME]


def with_own_output(tensor: torch.Tensor, owner: object, name: str) -> torch.Tensor:
    """Return ``tensor``, the value of ``owner.<name>``; assigning its ``output`` assigns that attribute."""
    if isinstance(tensor, torch.Tensor):
        _OWNERS[tensor] = (weakref.ref(owner), name)
    return tensor


def install() -> None:
    setattr(torch.Tensor, _NAME, _OwnOutput())
