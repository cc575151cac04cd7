from __future__ import annotations

from typing import Any, Final

from api_schemas.keys import Key, Tenant
from app.audit.records import Record

_OF_KEYS: Final = {"id", "tenant", "name", "scopes", "tier", "limits", "expires_at", "replaces", "presets"}
_OF_TENANTS: Final = {"name", "limits"}


def changed(thing: Key | Tenant) -> dict[str, Any]:
    """Return the current state of a key or a tenant, without secrets."""
    names = _OF_KEYS if isinstance(thing, Key) else _OF_TENANTS
    return thing.model_dump(mode="json", include=names, exclude_none=True)


def of_command(command: str, subject: str, thing: Key | Tenant) -> Record:
    """Return the record of a command, which needs no key; ``subject`` is empty for one that created a key."""
    made = thing.id if isinstance(thing, Key) else thing.name
    return Record("CLI", route=command, subject=subject or made, details=changed(thing))


__all__ = ["changed", "of_command"]
