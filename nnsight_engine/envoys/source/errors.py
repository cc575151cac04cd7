"""What can go wrong when a function's operations are asked for."""

from __future__ import annotations


class SourceNotAvailableError(ValueError):
    """A function's calls cannot be instrumented.

    Args:
        name: What the function is called towards the user.
        reason: Why it cannot be done.
        remedy: What the user can do instead.
    """

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        """Keep the parts; ``str()`` gives them as one sentence."""
        super().__init__(f"{name} has no operations to offer: {reason}; {remedy}")
        self.name = name
        self.reason = reason
        self.remedy = remedy
