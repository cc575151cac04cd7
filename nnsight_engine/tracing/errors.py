"""What can go wrong between a ``with`` statement and the function made of its block."""

from __future__ import annotations


class WithBlockNotFoundError(Exception):
    """The ``with`` statement of a trace was not found, or is not one; says where it was looked for."""


class ChangedSourceError(Exception):
    """A file, or a notebook's cell, does not say what was loaded from it."""


class TraceSyntaxError(SyntaxError):
    """The block holds a statement that cannot be run later, such as ``return`` or ``await``."""
