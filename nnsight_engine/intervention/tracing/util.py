"""What a backend of one's own raises."""

from __future__ import annotations

from typing import TypeVar

from nnsight_engine.core.config import CONFIG
from nnsight_engine.tracing.tracebacks import hide_our_frames
from nnsight_engine.tracing.tracer import Info

ErrorT = TypeVar("ErrorT", bound=BaseException)


def wrap_exception(exception: ErrorT, info: Info) -> ErrorT:  # noqa: ARG001 - blocks keep their own lines
    """Make an error of a block look as its author should see it.

    A backend writes ``raise wrap_exception(error, tracer.info) from None``. What it raises is the same error,
    so that every ``except`` still fits; its traceback leads to the author's line and leaves this package's
    frames out, unless ``CONFIG.APP.DEBUG`` is on.
    """
    if not CONFIG.APP.DEBUG:
        exception.__traceback__ = hide_our_frames(exception.__traceback__)
    return exception
