"""The audited details of changes to keys and tenants, over HTTP and by command."""

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
    """Return the record of a command on the server's machine, which needs no key.

    Args:
        command: The command, such as ``keys create``.
        subject: The command's argument; empty for a command that created a key.
        thing: The key or tenant after the change.
    """
    made = thing.id if isinstance(thing, Key) else thing.name
    return Record("CLI", route=command, subject=subject or made, details=changed(thing))


__all__ = ["changed", "of_command"]
