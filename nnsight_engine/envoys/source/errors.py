"""Errors of access to a function's operations."""

from __future__ import annotations


class SourceNotAvailableError(ValueError):
    """A function's calls cannot be instrumented.

    Args:
        name: The function's name in messages.
        reason: Why it cannot be instrumented.
        remedy: An alternative for the user.
    """

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"{name} has no operations to offer: {reason}; {remedy}")
        self.name = name
        self.reason = reason
        self.remedy = remedy
