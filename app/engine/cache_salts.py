"""Isolation of vLLM's caches: requests neither reuse nor detect what another tenant sent."""

from __future__ import annotations

import hashlib

from app.auth.principal import Principal
from app.engine.client import JsonObject
from app.media_parts import content_parts


def salt_of(body: JsonObject, caller: Principal) -> str:
    if body.get("cache_salt"):
        return "client"
    return "tenant" if caller.has_key else "none"


def isolate_cache(body: JsonObject, caller: Principal) -> None:
    """Set the cache salt, so that timing does not reveal whether another tenant sent a prompt.

    The ids by which clients name images, to send them once, are the tenant's own likewise.
    """
    if not caller.has_key:
        return
    salt = body.get("cache_salt")
    if salt is None or (salt and isinstance(salt, str)):  # vLLM refuses other values
        body["cache_salt"] = _own(salt or "", caller)
    for part in content_parts(body):
        if part.get("uuid") is not None:
            part["uuid"] = _own(str(part["uuid"]), caller)


def _own(name: str, caller: Principal) -> str:
    # Unambiguous, since no tenant's name has a colon; hashed, since vLLM limits the salt's length.
    return hashlib.sha256(f"{caller.tenant}:{name}".encode()).hexdigest()
