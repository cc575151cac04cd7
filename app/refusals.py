from __future__ import annotations

from api_schemas.errors import ApiError, ErrorCode


class ThrottledError(ApiError):
    """A request beyond its caller's limits; its headers are ``Retry-After`` and OpenAI's rate limits."""

    def __init__(self, message: str, headers: dict[str, str]) -> None:
        super().__init__(ErrorCode.RATE_LIMITED, message)
        self.headers = headers


__all__ = ["ThrottledError"]
