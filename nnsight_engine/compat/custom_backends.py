"""What custom backends import under nnsight's names: errors, and the state around the run of a block.

A backend enters ``Globals`` before it runs a block, and exits it afterwards. It gives nnsight's documented
names to the marks of the calling thread (``core.saves``) and to the process's trace sites
(``tracing.trace_sites``), and has no state of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import TypeVar

from nnsight_engine.core.config import CONFIG
from nnsight_engine.core.saves import SAVES
from nnsight_engine.tracing.frames import hide_our_frames
from nnsight_engine.tracing.trace_sites import TraceSites
from nnsight_engine.tracing.tracer import SITES, Info

ErrorT = TypeVar("ErrorT", bound=BaseException)


class ExceptionWrapper(Exception):  # noqa: N818 - the documented name
    """An error with the blocks that it passed through, for scripts that create or catch one.

    This library never raises it: errors of blocks keep their own type and the user's line. So
    ``isinstance(error, ExceptionWrapper)`` is False, and the error itself takes the place of ``.original``.

    Attributes:
        original: The error.
        infos: The blocks, innermost first.
    """

    def __init__(self, info: Info, original: Exception) -> None:
        super().__init__(*original.args)
        self.original = original
        self.infos = [info]

    def set_info(self, info: Info) -> None:
        """Append the next enclosing block."""
        self.infos.append(info)

    def __str__(self) -> str:
        return f"{type(self.original).__name__}: {self.original}"


def wrap_exception(exception: ErrorT, info: Info) -> ErrorT:  # noqa: ARG001 - blocks keep their own lines
    """Return a block's error with a traceback that ends at the user's line.

    A backend calls ``raise wrap_exception(error, tracer.info) from None``. The result is the same error
    object, so every ``except`` clause still matches. This package's frames are removed from its traceback,
    unless ``CONFIG.APP.DEBUG`` is on.
    """
    if not CONFIG.APP.DEBUG:
        exception.__traceback__ = hide_our_frames(exception.__traceback__)
    return exception


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
