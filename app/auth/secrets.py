"""The text of keys, ``nns_<id>_<secret>``, and their hashes; and keys that are given at the start.

The id is not secret. The secret has 256 random bits, so its SHA-256 is stored; a slow hash would let guesses
consume CPU time and delay valid keys. Keys of ``--api-key`` and ``VLLM_API_KEY`` have no rows in the
database.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Final

from api_schemas.administration import Limits, Scope, Tier
from app.auth.principal import Principal

_SCHEME: Final = "bearer"
_KEPT: Final = "sha256:"
_ID_BYTES: Final = 8
_SECRET_BYTES: Final = 32
_FORM: Final = re.compile(r"nns_([0-9a-f]{16})_([0-9A-Za-z_-]{43})")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Secret:
    id: str
    text: str


def bearer(authorization: str | None) -> str:
    """Return the credentials of an ``Authorization: Bearer`` header, unvalidated; empty if there are none."""
    scheme, _, text = (authorization or "").partition(" ")
    return text.strip() if scheme.lower() == _SCHEME else ""


def new_secret() -> Secret:
    key_id = secrets.token_hex(_ID_BYTES)
    return Secret(key_id, f"nns_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}")


def parse_key(text: str) -> Secret | None:
    """Parse a client's key; None if its format is not that of a key."""
    match = _FORM.fullmatch(text)
    return None if match is None else Secret(match[1], text)


def hashed(secret: Secret) -> str:
    return _KEPT + hashlib.sha256(secret.text.encode()).hexdigest()


def matches(secret: Secret, hash_: str) -> bool:
    """Return whether the hash is that of this key; takes the same time in either case."""
    return hmac.compare_digest(hashed(secret), hash_)


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
        matches = [hmac.compare_digest(digest, key_digest) for key_digest in self._digests]
        return _HOLDER if any(matches) else None

    def holder(self, key_id: str) -> Principal | None:
        """Return the caller for which work begun with such a key continues; None for other ids."""
        return _HOLDER if self and key_id == GIVEN_ID else None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
