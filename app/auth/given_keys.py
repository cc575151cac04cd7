"""The keys of ``--api-key`` and ``VLLM_API_KEY``, without rows in the database."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from api_schemas.keys import Limits, Scope, Tier
from app.auth.principal import Principal

GIVEN_ID: Final = "api-key"
_SCOPES: Final = frozenset(Scope) - {Scope.ADMIN}
_HOLDER: Final = Principal(GIVEN_ID, GIVEN_ID, _SCOPES, Tier.SANDBOXED, Limits(), Limits())
"""The tenant of all these keys, without limits. Its code runs in a sandbox."""


class GivenKeys:
    def __init__(self, texts: Sequence[str] = ()) -> None:
        self._digests = [_digest(text) for text in texts]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def principal(self, text: str) -> Principal | None:
        """Return the caller that a text authenticates; None if it is none of the keys.

        The time depends on neither the text nor the keys.
        """
        digest = _digest(text)
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        return _HOLDER if any(matches) else None

    def holder(self, key_id: str) -> Principal | None:
        """Return the caller for which work begun with such a key continues; None for other ids."""
        return _HOLDER if self and key_id == GIVEN_ID else None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


__all__ = ["GIVEN_ID", "GivenKeys"]
