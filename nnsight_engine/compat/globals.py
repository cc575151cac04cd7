"""``Globals``: the state that a custom backend enters before it runs a block, and exits afterwards.

It gives nnsight's documented names to the marks of the calling thread (``core.saves``) and to the process's
trace sites (``tracing.trace_sites``), and has no state of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet

from nnsight_engine.core.saves import SAVES, save
from nnsight_engine.tracing.trace_sites import TraceSites
from nnsight_engine.tracing.tracer import SITES


class SavedIds(MutableSet[int]):
    """The ``id`` of every value that is currently saved in this thread's traces."""

    def __contains__(self, identity: object) -> bool:
        return identity in SAVES.marked

    def __iter__(self) -> Iterator[int]:
        return iter(SAVES.marked)

    def __len__(self) -> int:
        return len(SAVES.marked)

    def add(self, identity: int) -> None:
        """Save the value with this ``id``, which the caller must keep alive; no effect outside a trace."""
        if SAVES.depth:
            SAVES.marked.setdefault(identity, None)

    def discard(self, identity: int) -> None:
        SAVES.marked.pop(identity, None)

    @classmethod
    def _from_iterable(cls, iterable: Iterable[int]) -> set[int]:  # type: ignore[override] # of set operators
        return set(iterable)


class _Globals:
    """The state shared by all traces; after ``cache.clear()`` each site is found and compiled again."""

    saves: SavedIds
    cache: TraceSites

    def __init__(self) -> None:
        self.saves = SavedIds()
        self.cache = SITES

    def __reduce__(self) -> str:
        """Serialize as a name: in another process, a block refers to that process's traces."""
        return "Globals"

    @property
    def stack(self) -> int:
        """The nesting depth of this thread's open traces."""
        return SAVES.depth

    def enter(self) -> None:
        """Begin a trace: values can be saved from now on."""
        SAVES.enter()

    def exit(self) -> None:
        """End the trace that ``enter`` began; the end of the outermost one drops the marks."""
        SAVES.exit()


Globals = _Globals()

__all__ = ["Globals", "save"]
