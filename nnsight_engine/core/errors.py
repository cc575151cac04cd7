"""What can go wrong in the engine: with one request, and with the options it is started with."""

from __future__ import annotations


class InterventionError(Exception):
    """One request fails; its neighbours and the engine do not.

    Args:
        code: A value of ``api_schemas.errors.ErrorCode``; the worker knows the code alone.
        message: The rule, the value, the next step.
    """

    def __init__(self, code: str, message: str) -> None:
        """Keep both parts; ``str()`` gives the message."""
        super().__init__(message)
        self.code = code
        self.message = message


class UnsupportedOptionError(Exception):
    """An engine option with which interventions could be silently wrong; the message names it."""
