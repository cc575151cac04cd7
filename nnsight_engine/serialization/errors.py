"""The two ways in which a message can fail: it cannot be written, or it cannot be trusted as read."""

from __future__ import annotations


class EncodeError(ValueError):
    """A value cannot travel; the message names the path to it, its type, why, and what to do instead."""


class DecodeError(ValueError):
    """Bytes are no message that this side accepts: broken, beyond a limit, or refused by its policy."""


class SandboxError(DecodeError):
    """Code asks for what the sandbox does not give; the message names it, its line and what there is instead.

    Raised while a message is read, and by its code while that runs.

    Attributes:
        line: Line of the code, in the sender's own file; None if it is not known.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        """Keep the line; the message has it in words."""
        super().__init__(message)
        self.line = line


class BudgetError(SandboxError):
    """Code has used up what it may: steps of Python, bytes of tensors, bytes of saved values."""


class FuelError(BudgetError):
    """Code has made more steps of Python than it may; the same code ends at the same step each time."""
