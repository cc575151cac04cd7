"""Input and output of a call, as properties that wait."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch

from nnsight_engine.envoys.eproperty import eproperty
from nnsight_engine.envoys.hooks import requires_input, requires_output


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

    @eproperty(key="input", description="input")
    @requires_input
    def input(self) -> Any:
        """The first argument: the first positional one, else the first by keyword."""

    @input.preprocess
    def _first(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = value
        return args[0] if args else next(iter(kwargs.values()), None)

    @input.postprocess
    def _with_first(self, value: Any) -> Any:
        args, kwargs = CallValues.inputs.__get__(self)  # not self.inputs, which may be a module of that name
        if args or not kwargs:
            return (value, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): value}


def names_input(kind: type[torch.nn.Module], names: Collection[str]) -> bool:
    """Return whether keyword arguments are a module's input.

    They are if they include all required parameters, or the first parameter if none is required. Other
    keyword arguments apply to every invoke of a trace, as ``model.trace(scale=2)`` does.
    """
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    named = [one for one in parameters if one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}]
    needed = {one.name for one in named if one.default is one.empty}
    first = {one.name for one in named[:1]}
    return bool(names) and bool(needed or first) and (needed or first) <= set(names)
