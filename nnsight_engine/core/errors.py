"""Why one request's interventions cannot go on: raised in the worker, told to that request only."""

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
