"""Fields that are changed for vLLM: the cache salt that keeps tenants apart, and the model's name.

No tenant reuses or detects what another one sent. Answers have the name that the client sent, with its
preset.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from app.auth.principal import Principal
from app.engine.client import JsonObject
from app.formats.json_bodies import content_parts
from app.formats.json_text import json_text
from app.http.errors import DONE_FRAME


def salt_of(body: JsonObject, caller: Principal) -> str:
    """Return whose cache salt a prompt has (``client``, ``tenant`` or ``none``), for the metrics."""
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
        body["cache_salt"] = _tenant_hash(salt or "", caller)
    for part in content_parts(body):
        if part.get("uuid") is not None:
            part["uuid"] = _tenant_hash(str(part["uuid"]), caller)


def _tenant_hash(name: str, caller: Principal) -> str:
    # Unambiguous, since no tenant's name has a colon; hashed, since vLLM limits the salt's length.
    return hashlib.sha256(f"{caller.tenant}:{name}".encode()).hexdigest()


_MODEL: Final = "model"
_DATA: Final = "data: "
_HOLDERS: Final = ("response", "message")
"""Objects of events that have the name: those of responses and of messages."""


def with_model(body: dict[str, Any], model: str | None) -> dict[str, Any]:
    """Return an answer or an event that names ``model`` wherever it names one; None changes nothing."""
    if model is None:
        return body
    holders = {name: with_model(body[name], model) for name in _HOLDERS if isinstance(body.get(name), dict)}
    return body | holders | ({_MODEL: model} if _MODEL in body else {})


def event_with_model(event: str, model: str) -> str:
    """Return a server-sent event whose JSON names ``model``."""
    if not event.startswith(_DATA) or event == DONE_FRAME:
        return event
    body = with_model(json.loads(event.removeprefix(_DATA)), model)
    return f"{_DATA}{json_text(body)}\n\n"
