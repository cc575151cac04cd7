"""Snapshots of a model's attributes, to undo what a block has set, added, replaced or removed.

The dicts, lists and sets that are reachable are copied, compared by identity, and restored.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from nnsight_engine.envoys.envoy import Envoy

_OBJECTS: Final = (
    torch.Tensor,
    torch.nn.Module,
    Envoy,
    PreTrainedConfig,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
_DEFINITIONS: Final = (FunctionType, BuiltinFunctionType, type, staticmethod, classmethod, property)
_MADE_LATER: Final = frozenset(
    {"__annotations__", "__doc__", "__weakref__", "__dict__", "_abc_impl", "__slotnames__"}
)


class AttributeSnapshot:
    def __init__(self, root: Any) -> None:
        self.objects: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self._held: list[_Dict | _List | _Set] = []
        self._kinds: list[tuple[Any, type, dict[str, Any]]] = []
        self._seen: dict[int, Any] = {}
        todo = [root]
        while todo:
            value = todo.pop()
            if id(value) not in self._seen:
                todo.extend(self._note(value))

    def restore(self) -> bool:
        """Restore the snapshot; return whether anything had changed."""
        for value, kind, attributes in self._kinds:
            if type(value) is not kind:
                object.__setattr__(value, "__class__", kind)
            if value.__dict__ is not attributes:
                object.__setattr__(value, "__dict__", attributes)
        return sum(held.restore() for held in self._held) > 0

    def _note(self, value: Any) -> Iterable[Any]:
        hanging: list[Any]
        if isinstance(value, dict):
            self._held.append(_Dict(value))
            hanging = [*value.values()]
        elif isinstance(value, list | set):
            self._held.append(_List(value) if isinstance(value, list) else _Set(value))
            hanging = [*value]
        elif isinstance(value, tuple):
            hanging = [*value]
        elif isinstance(value, _OBJECTS):
            found: list[Any] = self.tensors if isinstance(value, torch.Tensor) else self.objects
            found.append(value)
            self._kinds.append((value, type(value), vars(value)))
            hanging = [vars(value)]
        else:
            return ()
        self._seen[id(value)] = value  # the reference keeps its id valid
        return hanging


class Definitions:
    """The methods of classes and their bases, and what the modules that define them contain."""

    def __init__(self, classes: Iterable[type], modules: Iterable[ModuleType] = ()) -> None:
        found = {base for one in classes for base in one.__mro__ if base is not object}
        self._classes = [(one, dict(vars(one))) for one in found]
        # Found through a function that the class defines itself, so that no module has to be looked up by
        # name.
        spaces = {id(space): space for one in found for space in _namespaces(one)}
        spaces.update((id(vars(one)), vars(one)) for one in modules)
        self._spaces = [
            (space, {name: value for name, value in space.items() if isinstance(value, _DEFINITIONS)})
            for space in spaces.values()
        ]

    def restore(self) -> None:
        """Restore functions and classes; other variables of modules stay as they are."""
        for one, known in self._classes:
            now = vars(one)
            if not (len(now) == len(known) and all(map(operator.is_, now.values(), known.values()))):
                _restore_class(one, known)
        for space, known in self._spaces:
            if not all(map(operator.is_, map(space.get, known), known.values())):
                space.update(known)


def _namespaces(one: type) -> Iterator[dict[str, Any]]:
    for value in vars(one).values():
        if isinstance(value, FunctionType) and value.__module__ == one.__module__:
            yield value.__globals__


def _restore_class(one: type, known: dict[str, Any]) -> None:
    now = dict(vars(one))
    for name in now.keys() - known.keys() - _MADE_LATER:
        delattr(one, name)
    for name, value in known.items():
        if now.get(name) is not value and name not in _MADE_LATER:
            setattr(one, name, value)


class _Dict:
    def __init__(self, held: dict[Any, Any]) -> None:
        self._held = held
        self._known = dict(held)

    def restore(self) -> bool:
        held, known = self._held, self._known
        if _same(held, known) and _same(held.values(), known.values()):
            return False
        held.clear()
        held.update(known)
        return True


class _List:
    def __init__(self, held: list[Any]) -> None:
        self._held = held
        self._known = list(held)

    def restore(self) -> bool:
        if _same(self._held, self._known):
            return False
        self._held[:] = self._known
        return True


class _Set:
    def __init__(self, held: set[Any]) -> None:
        self._held = held
        self._known = frozenset(held)

    def restore(self) -> bool:
        if self._held == self._known:
            return False
        self._held.clear()
        self._held.update(self._known)
        return True


def _same(one: Collection[Any], other: Collection[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


__all__ = ["AttributeSnapshot", "Definitions"]
