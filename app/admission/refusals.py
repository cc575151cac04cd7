"""What a caller beyond their limits is told."""

from __future__ import annotations

from api_schemas.errors import ApiError, ErrorCode


class ThrottledError(ApiError):
    """A request beyond its caller's limits.

    Attributes:
        headers: When to come back, and OpenAI's headers of what is left.
    """

    def __init__(self, message: str, headers: dict[str, str]) -> None:
        """Keep both."""
        super().__init__(ErrorCode.RATE_LIMITED, message)
        self.headers = headers


__all__ = ["ThrottledError"]
