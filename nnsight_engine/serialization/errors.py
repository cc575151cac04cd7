from __future__ import annotations


class EncodeError(ValueError):
    """A value cannot be serialized; the message gives its path, its type, the reason and an alternative."""


class DecodeError(ValueError):
    """A message is not accepted: it is malformed, exceeds a limit, or is refused by the reader's policy."""


class SandboxError(DecodeError):
    """Code uses a feature that the sandbox does not offer; ``line`` is a line of the sender's own file."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line
