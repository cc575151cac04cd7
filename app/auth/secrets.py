"""Keys as text: made, taken apart, hashed, and compared with their hash.

A key is ``nns_<id>_<secret>``. The secret has 256 random bits, which nobody finds by trying, so what is kept
of it is its SHA-256, with which a stolen database opens nothing. A slow hash, meant for what people make up,
would let whoever guesses spend the server's time, and have right keys wait behind wrong ones. Keys made when
it was Argon2id still work, and are kept anew when they are shown. The id is no secret.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

_SCHEME: Final = "bearer"
_KEPT: Final = "sha256:"
_ID_BYTES: Final = 8
_SECRET_BYTES: Final = 32
_FORM: Final = re.compile(r"nns_([0-9a-f]{16})_([0-9A-Za-z_-]{43})")
_HASHER: Final = PasswordHasher(time_cost=1, memory_cost=8 * 1024, parallelism=1)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A key: ``id`` names it, ``text`` is all of it."""

    id: str
    text: str


def bearer(authorization: str | None) -> str:
    """Return what an ``Authorization`` header bears, as a key or as anything; nothing if it bears none."""
    scheme, _, text = (authorization or "").partition(" ")
    return text.strip() if scheme.lower() == _SCHEME else ""


def new_secret() -> Secret:
    """Make a key."""
    key_id = secrets.token_hex(_ID_BYTES)
    return Secret(key_id, f"nns_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}")


def parsed(text: str) -> Secret | None:
    """Return the key that a client sent, None if it is none of ours."""
    found = _FORM.fullmatch(text)
    return None if found is None else Secret(found[1], text)


def hashed(secret: Secret) -> str:
    """Return what is kept of a key."""
    return _KEPT + hashlib.sha256(secret.text.encode()).hexdigest()


def is_slow(kept: str) -> bool:
    """Tell whether comparing a key with what is kept of it takes milliseconds."""
    return not kept.startswith(_KEPT)


def matches(secret: Secret, kept: str) -> bool:
    """Tell whether this is the key that ``kept`` was made of; takes as long if it is not."""
    if not is_slow(kept):
        return hmac.compare_digest(hashed(secret), kept)
    try:
        return _HASHER.verify(kept, secret.text)
    except (VerificationError, InvalidHashError):
        return False


__all__ = ["Secret", "bearer", "hashed", "is_slow", "matches", "new_secret", "parsed"]
