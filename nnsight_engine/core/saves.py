"""The values that outlive a trace: those that a block marked with ``save``.

Other variables of a block are dropped at the end, so that a forward pass does not keep every activation.
Marks are thread-local, and hold the values themselves: an ``id`` could be reused within the same trace.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeVar

T = TypeVar("T")
_INDEX: Final = re.compile(r"\.(\d+)")

_MAX_LOOKED_INTO = 4096
"""Number of items of a container that are searched for a mark; mark a longer list itself to keep it."""

_MAX_DEPTH = 8
"""Depth to which nested containers are searched; a list may contain itself."""


class Place:
    """Base of objects that stand for a place in a model, such as envoys: they have values and are none."""

    __slots__ = ()


class Saves(threading.local):
    """The marks of this thread's traces, shared by nested traces and dropped with the outermost one."""

    def __init__(self) -> None:
        self.depth = 0
        self.marked: dict[int, Any] = {}

    def enter(self) -> None:
        self.depth += 1

    def exit(self) -> None:
        self.depth -= 1
        if not self.depth:
            self.marked = {}

    @contextlib.contextmanager
    def outermost(self) -> Iterator[dict[int, Any]]:
        """Run a thread's outermost trace and yield its marks: none of other traces, even interrupted ones."""
        self.depth, self.marked = 1, {}
        try:
            yield self.marked
        finally:
            self.depth, self.marked = 0, {}

    def mark(self, value: Any) -> None:
        """Keep ``value`` beyond the trace, if there is one; TypeError for a place, or its container."""
        if self.depth:
            refuse_places(value)
            self.marked[id(value)] = value

    def check(self) -> None:
        """Raise TypeError if a place in the model was added to a saved container."""
        for value in self.marked.values():
            refuse_places(value)

    def keeps(self, value: Any) -> bool:
        return holds_marked(value, self.marked)


def holds_marked(value: Any, marked: Mapping[int, Any], depth: int = _MAX_DEPTH) -> bool:
    """Return whether a value, or one inside of its nested containers, is marked."""
    if id(value) in marked:
        return True
    kind = type(value)
    if depth and (kind is list or kind is tuple):
        return any(holds_marked(item, marked, depth - 1) for item in value[:_MAX_LOOKED_INTO])
    if depth and kind is dict:
        items = islice(value.values(), _MAX_LOOKED_INTO)
        return any(holds_marked(item, marked, depth - 1) for item in items)
    return False


def refuse_places(value: Any, depth: int = _MAX_DEPTH) -> None:
    """Raise TypeError if a value is a place in the model, or holds one in nested containers."""
    kind = type(value)
    if issubclass(kind, Place):
        attributes = value.__dict__
        path = str(attributes.get("path") or attributes.get("_prefix") or kind.__name__)
        name = _INDEX.sub(r"[\1]", path)
        raise TypeError(
            f"{name} is a place in the model and no value, so it cannot be saved. Save a value that it has, "
            f"such as its output: `{name}.output.save()`"
        )
    if depth and (kind is list or kind is tuple or kind is dict):
        items = value.values() if kind is dict else value
        for item in islice(items, _MAX_LOOKED_INTO):
            refuse_places(item, depth - 1)


SAVES = Saves()
"""The marks of the calling thread."""


def save(value: T) -> T:
    """Keep ``value`` after the trace ends, and return it.

    Works on any value: ``hidden = save(model.layers[3].output)``. A list, tuple or dict that holds a saved
    value is kept as well. Outside a trace it only returns its argument.

    Raises:
        TypeError: ``value`` is an envoy, which has values and is none.
    """
    SAVES.mark(value)
    return value
