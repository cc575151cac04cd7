"""The routing properties of a request: its model, and a key shared by requests with a common prompt prefix.

Bodies are parsed once, at the top level only. Malformed ones yield no properties; the replica rejects them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Final

import msgspec

from app.middleware import RESULTS_PREFIX
from app.replicas.replica_ranking import key_of

_MODELS: Final = "/models/"
_MAX_NAME_BYTES: Final = 4096
_NOTHING: Final = msgspec.Raw(b"")


@dataclasses.dataclass(frozen=True, slots=True)
class RequestRoute:
    """The model that the request names, and its key for ``replica_ranking``; both may be empty."""

    model: str = ""
    key: bytes = b""


class _Body(msgspec.Struct):
    model: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    interventions: msgspec.Raw = _NOTHING
    cache_salt: msgspec.Raw = _NOTHING


def of_body(body: bytes | bytearray, key: bytes, *, prefix_bytes: int) -> RequestRoute:
    """Return the routing properties of a whole JSON body.

    Args:
        key: The caller's credential, which separates the caches of tenants.
        prefix_bytes: Requests whose prompts share this many bytes get the same key; shorter prompts get none.
            0 disables keys.
    """
    try:
        found = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return RequestRoute()
    beginning = bytes(memoryview(found.messages or found.prompt)[:prefix_bytes])
    if not prefix_bytes or len(beginning) < prefix_bytes:
        return RequestRoute(_name(found.model))
    # Not copied: they may be large.
    common: list[bytes | memoryview] = [
        key,
        memoryview(found.cache_salt),
        memoryview(found.interventions),
        beginning,
    ]
    return RequestRoute(_name(found.model), key_of(common))


def split_path(path: str, models: Collection[str]) -> tuple[str, str]:
    """Return the model of ``/models/NAME/v1/…``, empty if none, and the path without it."""
    rest = path.removeprefix(_MODELS)
    found = [name for name in models if path.startswith(_MODELS) and rest.startswith(f"{name}/")]
    model = max(found, key=len, default="")
    return model, rest.removeprefix(model) if model else path


def owner_of(path: str) -> str:
    """Return the replica that owns a path, empty for any; ids of results begin with their replica."""
    owner, has_owner, _ = path.removeprefix(RESULTS_PREFIX).partition(".")
    return owner if has_owner and path.startswith(RESULTS_PREFIX) else ""


def _name(raw: msgspec.Raw) -> str:
    if len(raw) > _MAX_NAME_BYTES:
        return ""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


__all__ = ["RequestRoute", "of_body", "owner_of", "split_path"]
