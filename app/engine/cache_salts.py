"""Isolation of the prefix cache: requests neither reuse nor detect another tenant's prompts."""

from __future__ import annotations

import hashlib

from app.auth.principal import Principal
from app.engine.client import JsonObject


def salt_of(body: JsonObject, caller: Principal) -> str:
    """Return what separates a request's entries from those of others, before it is isolated."""
    if body.get("cache_salt"):
        return "client"
    return "tenant" if caller.has_key else "none"


def isolate_cache(body: JsonObject, caller: Principal) -> None:
    """Set the cache salt, so that timing does not reveal whether another tenant sent a prompt."""
    if not caller.has_key:
        return
    salt = body.get("cache_salt")
    if salt is None or (salt and isinstance(salt, str)):  # vLLM refuses other values
        # Unambiguous, since no tenant's name has a colon; hashed, since vLLM limits the salt's length.
        body["cache_salt"] = hashlib.sha256(f"{caller.tenant}:{salt or ''}".encode()).hexdigest()
