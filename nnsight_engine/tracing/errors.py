from __future__ import annotations


class WithBlockNotFoundError(Exception):
    """The ``with`` statement of a trace was not found, or there is none; the message names the place."""


class ChangedSourceError(Exception):
    """A file, or a notebook's cell, has changed since the running code was loaded from it."""


class TraceSyntaxError(SyntaxError):
    """The block contains a statement that cannot be run later, such as ``return`` or ``await``."""
