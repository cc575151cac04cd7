"""Trees of tensors: tensors in nested tuples, lists, dicts, namedtuples, dataclasses and model outputs.

Containers are never edited: a change makes new ones along its path, and an unchanged part stays the same
object, so ``is`` shows whether anything changed. Objects of other classes (a cache, a module) are leaves.
Interleaving calls this once or more per module and step, so a bare tensor and a flat tuple take a fast path.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

TreeT = TypeVar("TreeT")
MapFunction = Callable[[Tensor], Tensor]
LeafFunction = Callable[[object], object]
PairFunction = Callable[[Tensor, Tensor], Tensor]

MAX_DEPTH = 64
_PLAIN_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class TreeDepthError(ValueError):
    """A tree is deeper than any that a model passes on, most likely because it contains itself."""

    def __init__(self) -> None:
        super().__init__(
            f"containers of tensors may nest {MAX_DEPTH} deep, got deeper; does one of them contain itself?"
        )


class TreeMismatchError(ValueError):
    """Two trees that must have the same shape differ, at ``path`` (empty at the root)."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path or 'the value'}: {reason}")
        self.path = path
        self.reason = reason


def map_tensors(tree: TreeT, fn: MapFunction, other: LeafFunction | None = None) -> TreeT:
    """Return the tree with ``fn(tensor)`` and ``other(leaf)``; the tree itself if nothing changed."""
    if isinstance(tree, Tensor):
        return cast("TreeT", fn(tree))
    return cast("TreeT", _map(tree, fn, 0, other))


def map_pairs(full: TreeT, part: object, fn: PairFunction) -> TreeT:
    """Return ``full`` with ``fn(tensor, its counterpart in part)`` in place of every tensor.

    A sequence matches any sequence of its length, a mapping any with its keys; the result has the classes of
    ``full``. Other leaves must be equal numbers or strings, or the same object, because only tensors have
    rows that one request can own. A TreeMismatchError names the place.
    """
    return cast("TreeT", _map_pair(full, part, fn, "", 0))


def tensors(tree: object) -> Iterator[Tensor]:
    """Yield the tensors from left to right; one that occurs twice is yielded twice."""
    return _walk(tree, 0)


class _Container(Protocol):
    def values(self, tree: object) -> list[object]: ...

    def rebuild(self, tree: object, values: list[object]) -> object: ...

    def label(self, tree: object, index: int, /) -> str: ...

    def align(self, tree: object, part: object, path: str) -> list[object]: ...


class _Sequence:
    def __init__(self, make: Callable[[object, list[object]], object]) -> None:
        self._make = make

    def values(self, tree: object) -> list[object]:
        return list(cast("Iterable[object]", tree))

    def rebuild(self, tree: object, values: list[object]) -> object:
        return self._make(tree, values)

    def label(self, _tree: object, index: int, /) -> str:
        return f"[{index}]"

    def align(self, tree: object, part: object, path: str) -> list[object]:
        """Return the items of ``part`` beside those of ``tree``; raise where the two do not match."""
        if not isinstance(part, (tuple, list)):
            raise TreeMismatchError(path, f"expected {_describe(tree)}, got {_describe(part)}")
        if len(part) != len(self.values(tree)):
            raise TreeMismatchError(path, f"expected {len(self.values(tree))} elements, got {len(part)}")
        return list(part)


class _Mapping:
    def values(self, tree: object) -> list[object]:
        return list(cast("dict[object, object]", tree).values())

    def rebuild(self, tree: object, values: list[object]) -> object:
        """Return a copy of ``tree`` with other values."""
        # copy.copy keeps the state that a subclass has beside its items: a default factory, the fields of a
        # model output. Only changed keys are set, because setting one may run a Python method.
        old = cast("dict[object, object]", tree)
        new = copy.copy(old)
        for (key, before), after in zip(old.items(), values, strict=True):
            if before is not after:
                new[key] = after
        return new

    def label(self, tree: object, index: int, /) -> str:
        key = list(cast("dict[object, object]", tree))[index]
        return f".{key}" if dataclasses.is_dataclass(tree) else f"[{key!r}]"

    def align(self, tree: object, part: object, path: str) -> list[object]:
        """Return the values of ``part`` in the order of the keys of ``tree``; raise unless the keys match."""
        if not isinstance(part, (dict, collections.UserDict)):
            raise TreeMismatchError(path, f"expected {_describe(tree)}, got {_describe(part)}")
        keys = list(cast("dict[object, object]", tree))
        if part.keys() != set(keys):
            raise TreeMismatchError(path, f"expected the keys {keys}, got {list(part)}")
        items = dict(part.items())
        return [items[key] for key in keys]


class _Fields:
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def values(self, tree: object) -> list[object]:
        # A field with init=False may never have been set.
        return [getattr(tree, name, None) for name in self._names]

    def rebuild(self, tree: object, values: list[object]) -> object:
        """Return a copy of a dataclass's instance with other values."""
        # Not dataclasses.replace: it runs __init__ and __post_init__ again, which may check or derive.
        new = copy.copy(tree)
        for name, before, after in zip(self._names, self.values(tree), values, strict=True):
            if before is not after:
                object.__setattr__(new, name, after)  # works for a frozen one too; the copy is not shared yet
        return new

    def label(self, _tree: object, index: int, /) -> str:
        return f".{self._names[index]}"

    def align(self, tree: object, part: object, path: str) -> list[object]:
        if type(part) is not type(tree):
            raise TreeMismatchError(path, f"expected {_describe(tree)}, got {_describe(part)}")
        return self.values(part)


def _tuple_like(tree: object, values: list[object]) -> object:
    """Build a tuple of the subclass of ``tree`` without its ``__new__``, whose arguments are unknown."""
    cls = cast("type[tuple[object, ...]]", type(tree))
    if hasattr(cls, "n_sequence_fields"):
        return cls(values)  # a C structure, such as torch.return_types.max, needs its own constructor
    new = tuple.__new__(cls, values)
    if hasattr(tree, "__dict__"):
        new.__dict__.update(tree.__dict__)
    return new


def _list_like(tree: object, values: list[object]) -> object:
    new = cast("list[object]", copy.copy(tree))
    new[:] = values
    return new


_MAPPING = _Mapping()
_BUILTIN: dict[type, _Container] = {
    tuple: _Sequence(lambda _, values: tuple(values)),
    list: _Sequence(lambda _, values: values),
    dict: _MAPPING,
}
_BASES: tuple[tuple[type, _Container], ...] = (
    (tuple, _Sequence(_tuple_like)),
    (list, _Sequence(_list_like)),
    (dict, _MAPPING),
    (collections.UserDict, _MAPPING),
)


def _find_container(cls: type) -> _Container | None:
    """Return how to read and rebuild objects of a class; None if they are leaves."""
    builtin = _BUILTIN.get(cls)
    if builtin is not None:
        return builtin
    if issubclass(cls, torch.nn.Module):
        return None  # even one that is a dataclass or a dict too: its identity must be kept
    for base, container in _BASES:
        if issubclass(cls, base):
            return container
    if dataclasses.is_dataclass(cls):
        return _Fields(tuple(field.name for field in dataclasses.fields(cls)))
    return None


# Bounded, so that classes made in a loop do not accumulate.
_container: Callable[[type], _Container | None] = functools.lru_cache(maxsize=512)(_find_container)


def _map(tree: object, fn: MapFunction, depth: int, other: LeafFunction | None) -> object:
    """Do ``map_tensors`` on a tree that is no tensor, inside of ``depth`` containers."""
    container = _container(type(tree))
    if container is None:
        return tree if other is None else other(tree)
    if depth >= MAX_DEPTH:
        raise TreeDepthError
    values = container.values(tree)
    below = depth + 1
    mapped = [fn(item) if isinstance(item, Tensor) else _map(item, fn, below, other) for item in values]
    return container.rebuild(tree, mapped) if _differ(values, mapped) else tree


def _map_pair(full: object, part: object, fn: PairFunction, path: str, depth: int) -> object:
    """Return ``full`` with ``fn(its tensor, part's at the same place)`` for each; itself if none changes.

    ``path`` is this place, for errors.
    """
    if isinstance(full, Tensor):
        if not isinstance(part, Tensor):
            raise TreeMismatchError(path, f"expected a tensor, got {_describe(part)}")
        return fn(full, part)
    container = _container(type(full))
    if container is None:
        return _same_leaf(full, part, path)
    if depth >= MAX_DEPTH:
        raise TreeDepthError
    values = container.values(full)
    mapped: list[object] = []
    for index, (value, other) in enumerate(zip(values, container.align(full, part, path), strict=True)):
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            mapped.append(fn(value, other))
        else:
            below = path + container.label(full, index)
            mapped.append(_map_pair(value, other, fn, below, depth + 1))
    return container.rebuild(full, mapped) if _differ(values, mapped) else full


def _walk(tree: object, depth: int) -> Iterator[Tensor]:
    """Yield the tensors of a tree inside of ``depth`` containers."""
    if isinstance(tree, Tensor):
        yield tree
        return
    container = _container(type(tree))
    if container is None:
        return
    if depth >= MAX_DEPTH:
        raise TreeDepthError
    for value in container.values(tree):
        yield from _walk(value, depth + 1)


def _differ(before: list[object], after: list[object]) -> bool:
    return any(map(operator.is_not, before, after))


def _same_leaf(full: object, part: object, path: str) -> object:
    """Return a leaf that must be the same in both trees; raise TreeMismatchError if it is not."""
    if full is part or (isinstance(full, _PLAIN_VALUES) and type(full) is type(part) and full == part):
        return full
    raise TreeMismatchError(
        path, f"expected {_describe(full)} as it was, for only tensors have rows, got {_describe(part)}"
    )


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, _PLAIN_VALUES):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}…"
    return f"a {type(value).__name__}"
