"""Errors of the engine: of one request, and of the options that it is started with."""

from __future__ import annotations


class InterventionError(Exception):
    """One request fails; other requests and the engine continue.

    Args:
        code: A value of ``api_schemas.errors.ErrorCode``, as a string.
        message: The rule, the value, the next step.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class UnsupportedOptionError(Exception):
    """An engine option under which interventions could be silently wrong; the message names the option."""
