"""``Globals``: what a custom backend enters before it runs a block, and exits afterwards.

It stands for the marks of the calling thread (see ``core.saves``) and for the process's trace sites (see
``tracing.sites``); both are where they are, and this only gives them the documented names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet

from nnsight_engine.core.saves import SAVES, save
from nnsight_engine.tracing.trace_sites import TraceSites
from nnsight_engine.tracing.tracer import SITES


class SavedIds(MutableSet[int]):
    """The ``id`` of every value that is saved now, in this thread's traces."""

    def __contains__(self, identity: object) -> bool:
        """Tell whether the value of this ``id`` is saved."""
        return identity in SAVES.marked

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids, in the order of saving."""
        return iter(SAVES.marked)

    def __len__(self) -> int:
        """Return how many values are saved."""
        return len(SAVES.marked)

    def add(self, identity: int) -> None:
        """Save the value of this ``id``, which the caller keeps alive; outside a trace nothing happens."""
        if SAVES.depth:
            SAVES.marked.setdefault(identity, None)

    def discard(self, identity: int) -> None:
        """Save the value of this ``id`` no longer."""
        SAVES.marked.pop(identity, None)

    @classmethod
    def _from_iterable(cls, iterable: Iterable[int]) -> set[int]:  # type: ignore[override] # of set operators
        return set(iterable)


class _Globals:
    """The state that traces share; there is one, ``Globals``.

    Attributes:
        saves: The ids of the saved values.
        cache: The compiled trace sites; ``cache.clear()`` has each found and compiled anew.
    """

    saves: SavedIds
    cache: TraceSites

    def __init__(self) -> None:
        """Look at the thread's marks and the process's sites."""
        self.saves = SavedIds()
        self.cache = SITES

    def __reduce__(self) -> str:
        """Travel by name: a block that runs elsewhere means that process's traces."""
        return "Globals"

    @property
    def stack(self) -> int:
        """How many traces of this thread are open, one within the other."""
        return SAVES.depth

    def enter(self) -> None:
        """Let values be saved from here on."""
        SAVES.enter()

    def exit(self) -> None:
        """End what ``enter`` began; the outermost one forgets what was saved."""
        SAVES.exit()


Globals = _Globals()

__all__ = ["Globals", "save"]
