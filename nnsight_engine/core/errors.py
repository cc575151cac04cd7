from __future__ import annotations


class InterventionError(Exception):
    """One request fails, with a ``code`` of ``api_schemas.errors.ErrorCode``; other requests continue."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class UnsupportedOptionError(Exception):
    """An engine option under which interventions could be silently wrong; the message names the option."""
