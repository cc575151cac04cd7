"""The values that outlive a trace: those that a block marked with ``save``.

A block's variables are dropped at the end of the trace, so that a forward pass does not keep every
activation that a block read. ``save(value)`` marks a value; the outermost trace hands the marked values back
to the user's variables.

Marks are thread-local: two threads that trace at once never see each other's. They hold the values
themselves, because an ``id`` alone could be reused by another object within the same trace.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_LOOKED_INTO = 4096
"""Number of items of a container that are searched for a mark; mark a longer list itself to keep it."""

_MAX_DEPTH = 8
"""Depth to which nested containers are searched; a list may contain itself."""


class Saves(threading.local):
    """The marks of this thread's traces, shared by nested traces and dropped with the outermost one."""

    def __init__(self) -> None:
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

    @contextlib.contextmanager
    def outermost(self) -> Iterator[dict[int, Any]]:
        """Run the outermost trace of a thread that may run others before and after; yield the trace's marks.

        The thread has no marks of other traces, even of one that was interrupted between two statements.
        """
        self.depth, self.marked = 1, {}
        try:
            yield self.marked
        finally:
            self.depth, self.marked = 0, {}

    def mark(self, value: Any) -> None:
        """Keep ``value`` beyond the trace; do nothing outside of one."""
        if self.depth:
            self.marked[id(value)] = value

    def keeps(self, value: Any) -> bool:
        """Return whether ``value`` is marked, or is a plain container that holds a marked value."""
        return holds_marked(value, self.marked)


def holds_marked(value: Any, marked: Mapping[int, Any], depth: int = _MAX_DEPTH) -> bool:
    """Return whether ``value`` is one of the marked objects, or is a plain container that holds one."""
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
"""The marks of the calling thread."""


def save(value: T) -> T:
    """Keep ``value`` after the trace ends, and return it.

    Works on any object: ``hidden = save(model.layers[3].output)``. A list, tuple or dict that holds a saved
    value is kept as well. Outside a trace it only returns its argument.
    """
    SAVES.mark(value)
    return value
