"""Which values outlive a trace: the ones a block marked with ``save``.

A block's variables end with the trace, so that a forward pass does not keep every activation that a block
looked at. ``save(value)`` marks one; the outermost trace hands the marked ones back to the user's variables.

Marks belong to a thread: two threads tracing at once never see each other's. They hold the values
themselves, because an ``id`` alone could be reused by the next object within the same trace.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_LOOKED_INTO = 4096
"""Items of a container that are looked at for a marked one; a longer list is kept by marking it itself."""

_MAX_DEPTH = 8
"""Containers within containers that are looked into; a list may hold itself."""


class Saves(threading.local):
    """The marks of this thread's traces, nested ones together: they end with the outermost."""

    def __init__(self) -> None:
        """Begin with no trace and no marks."""
        self.depth = 0
        self.marked: dict[int, Any] = {}

    def enter(self) -> None:
        """Begin a trace, outermost or nested."""
        self.depth += 1

    def exit(self) -> None:
        """End a trace; the outermost one drops the marks."""
        self.depth -= 1
        if not self.depth:
            self.marked = {}

    def mark(self, value: Any) -> None:
        """Keep ``value`` beyond the trace; outside of one there is nothing to outlive."""
        if self.depth:
            self.marked[id(value)] = value

    def keeps(self, value: Any) -> bool:
        """Tell whether ``value`` is marked, or is a plain container that holds a marked value."""
        return holds_marked(value, self.marked)


def holds_marked(value: Any, marked: Mapping[int, Any], depth: int = _MAX_DEPTH) -> bool:
    """Tell whether ``value`` is one of the marked, by identity, or is a plain container that holds one."""
    if id(value) in marked:
        return True
    kind = type(value)
    if depth and (kind is list or kind is tuple):
        return any(holds_marked(item, marked, depth - 1) for item in value[:_MAX_LOOKED_INTO])
    if depth and kind is dict:
        items = islice(value.values(), _MAX_LOOKED_INTO)
        return any(holds_marked(item, marked, depth - 1) for item in items)
    return False


SAVES = Saves()
"""The marks of whichever thread asks."""


def save(value: T) -> T:
    """Keep ``value`` after the trace ends, and return it.

    Works on any object: ``hidden = save(model.layers[3].output)``. A list, tuple or dict that holds a saved
    value is kept as well. Outside a trace it only returns its argument.
    """
    SAVES.mark(value)
    return value
