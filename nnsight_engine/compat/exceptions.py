"""What a backend of one's own raises."""

from __future__ import annotations

from typing import TypeVar

from nnsight_engine.core.config import CONFIG
from nnsight_engine.tracing.tracebacks import hide_our_frames
from nnsight_engine.tracing.tracer import Info

ErrorT = TypeVar("ErrorT", bound=BaseException)


class ExceptionWrapper(Exception):  # noqa: N818 - the documented name
    """An error with the blocks that it went through, for scripts that make or look for one.

    Nothing here raises it: errors of blocks keep their own type and the line of their author, so
    ``isinstance(error, ExceptionWrapper)`` is false, and the error is what ``.original`` is there.

    Attributes:
        original: The error.
        infos: The blocks, the innermost first.
    """

    def __init__(self, info: Info, original: Exception) -> None:
        """Wrap an error of a block."""
        super().__init__(*original.args)
        self.original = original
        self.infos = [info]

    def set_info(self, info: Info) -> None:
        """Add the block around those."""
        self.infos.append(info)

    def __str__(self) -> str:
        """Return the error's type and text."""
        return f"{type(self.original).__name__}: {self.original}"


def wrap_exception(exception: ErrorT, info: Info) -> ErrorT:  # noqa: ARG001 - blocks keep their own lines
    """Make an error of a block look as its author should see it.

    A backend writes ``raise wrap_exception(error, tracer.info) from None``. What it raises is the same error,
    so that every ``except`` still fits; its traceback leads to the author's line and leaves this package's
    frames out, unless ``CONFIG.APP.DEBUG`` is on.
    """
    if not CONFIG.APP.DEBUG:
        exception.__traceback__ = hide_our_frames(exception.__traceback__)
    return exception
