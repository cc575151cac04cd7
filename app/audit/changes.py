"""What is written down of changes of keys and tenants, over HTTP and by command."""

from __future__ import annotations

from typing import Any, Final

from api_schemas.keys import Key, Tenant
from app.audit.records import Record

_OF_KEYS: Final = {"id", "tenant", "name", "scopes", "tier", "limits", "expires_at", "replaces"}
_OF_TENANTS: Final = {"name", "limits"}


def changed(thing: Key | Tenant) -> dict[str, Any]:
    """Return what a key or a tenant is now; never what opens anything."""
    names = _OF_KEYS if isinstance(thing, Key) else _OF_TENANTS
    return thing.model_dump(mode="json", include=names, exclude_none=True)


def of_command(command: str, subject: str, thing: Key | Tenant) -> Record:
    """Return the record of a command on the server's machine, for which nobody's key was needed.

    Args:
        command: Like `keys create`.
        subject: What it was given; empty for a key that it made.
        thing: What became of it.
    """
    made = thing.id if isinstance(thing, Key) else thing.name
    return Record("CLI", route=command, subject=subject or made, details=changed(thing))


__all__ = ["changed", "of_command"]
