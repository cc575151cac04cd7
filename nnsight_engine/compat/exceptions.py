"""Errors for custom backends, under nnsight's names."""

from __future__ import annotations

from typing import TypeVar

from nnsight_engine.core.config import CONFIG
from nnsight_engine.tracing.tracebacks import hide_our_frames
from nnsight_engine.tracing.tracer import Info

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
