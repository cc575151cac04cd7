"""The prefix cache between tenants: what one has sent, another's request neither reads nor learns of."""

from __future__ import annotations

import hashlib

from app.auth.principal import Principal
from app.engine.client import JsonObject


def keep_apart(body: JsonObject, caller: Principal) -> None:
    """Let nobody learn from how long a prompt takes whether another tenant has sent it."""
    if not caller.has_key:
        return
    salt = body.get("cache_salt")
    if salt is None or (salt and isinstance(salt, str)):  # vLLM refuses the rest
        # No tenant's name has a colon; vLLM takes no more than so many characters.
        body["cache_salt"] = hashlib.sha256(f"{caller.tenant}:{salt or ''}".encode()).hexdigest()
