"""State that a model keeps from step to step, such as KV caches: objects that hold rows of the whole batch.

``core.trees`` does not treat them as containers, since the model continues with the same object. An invoke
gets a copy of the object, and of the layers in it, whose tensors are views of its own rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch


def holds_state(value: object) -> bool:
    """Return whether an object is a cache, such as ``DynamicCache``, ``StaticCache`` or ``MambaCache``."""
    return hasattr(value, "__dict__") and _is_one(type(value), "Cache")


def without_state(leaf: Any) -> Any:
    return None if holds_state(leaf) else leaf


def map_state(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: map_state(one, fn) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([map_state(one, fn) for one in value])  # a cache has no namedtuples
    if not _is_part(value):
        return value
    made = copy.copy(value)
    made.__dict__.update({name: map_state(one, fn) for name, one in vars(value).items()})
    return made


def state_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from state_tensors(one)
    elif isinstance(value, dict):
        yield from state_tensors(list(value.values()))
    elif _is_part(value):
        yield from state_tensors(list(vars(value).values()))


def _is_part(value: object) -> bool:
    return hasattr(value, "__dict__") and (_is_one(type(value), "Cache") or _is_one(type(value), "Layer"))


def _is_one(kind: type, name: str) -> bool:
    """Match a class, or a base, by the end of its name, as many models have own caches; never a module."""
    return not issubclass(kind, torch.nn.Module | type) and any(
        base.__name__.endswith(name) for base in kind.__mro__
    )


__all__ = ["holds_state", "map_state", "state_tensors", "without_state"]
