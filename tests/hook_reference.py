"""What a module computes by itself, seen and edited with torch's own hooks: what the engine is compared with.

Every value is copied when the module returns it, so that later edits in place do not reach the record. Only
modules outside of traces are handed in here; one without weights stands for its twin that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

Edit = Callable[[Any], Any]
"""Takes a module's output and returns what replaces it."""

TWIN: Final = "_twin"
"""Where the module of a client without weights has the same module with weights, see ``served``."""


def with_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module, or the one with weights that it stands for."""
    twin: torch.nn.Module = vars(module).get(TWIN, module)
    return twin


def copied(value: Any) -> Any:
    """Return the value with copies of its tensors, tuples and dicts included."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(copied(item) for item in value)
    if type(value) is dict:
        return {name: copied(item) for name, item in value.items()}
    return value


@contextmanager
def recorded(
    module: torch.nn.Module, *paths: str, copy: Callable[[Any], Any] = copied
) -> Iterator[dict[str, list[Any]]]:
    """Record the outputs of the modules at ``paths``, one per call."""
    outputs: dict[str, list[Any]] = {path: [] for path in paths}

    def record(path: str) -> Any:
        return (
            with_weights(module)
            .get_submodule(path)
            .register_forward_hook(lambda _module, _args, output: outputs[path].append(copy(output)))
        )

    hooks = [record(path) for path in paths]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def recorded_inputs(module: torch.nn.Module, path: str) -> Iterator[list[tuple[Any, Any]]]:
    """Record ``(args, kwargs)`` of the module at ``path``, one per call."""
    inputs: list[tuple[Any, Any]] = []
    hook = (
        with_weights(module)
        .get_submodule(path)
        .register_forward_pre_hook(
            lambda _module, args, kwargs: inputs.append((copied(args), copied(kwargs))), with_kwargs=True
        )
    )
    try:
        yield inputs
    finally:
        hook.remove()


@contextmanager
def edited(module: torch.nn.Module, path: str, edit: Edit, *, calls: range | None = None) -> Iterator[None]:
    """Replace the output of the module at ``path`` by ``edit(output)``, in some of its calls or in all."""
    count = 0

    def replace(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
        nonlocal count
        count += 1
        return edit(output) if calls is None or count - 1 in calls else output

    hook = with_weights(module).get_submodule(path).register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()


def outputs_of(module: torch.nn.Module, inputs: dict[str, Any], *paths: str) -> list[Any]:
    """Run the module and return what the modules at ``paths`` gave, the first time each was called."""
    with recorded(module, *paths) as outputs:
        with_weights(module)(**inputs)
    return [outputs[path][0] for path in paths]


def first(output: Any) -> torch.Tensor:
    """Return a module's output, or its first part."""
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def on_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Return the edit that replaces a copy of the output, or of its first part, by ``change`` of it."""

    def edit(output: Any) -> Any:
        changed = change(first(output).clone())
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return edit


def gradients(module: torch.nn.Module, inputs: dict[str, Any], *paths: str) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the summed logits at what the modules at ``paths`` return."""
    with recorded(module, *paths, copy=lambda output: output) as outputs:
        logits = with_weights(module)(**inputs).logits
    return torch.autograd.grad(logits.sum(), [outputs[path][0] for path in paths])
