from __future__ import annotations


class SourceNotAvailableError(ValueError):
    """A function's calls cannot be instrumented; the message has the reason and an alternative."""

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"{name} has no operations to offer: {reason}; {remedy}")
        self.name = name
        self.reason = reason
        self.remedy = remedy
