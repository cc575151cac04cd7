"""What of a request says where it goes: its model, and what others may have in common with it.

Bodies are looked at once, without building anything of them, and only as far as the top level; whatever is
not what it should be says nothing here, and the replica refuses it. The front calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Final

import msgspec

from app.middleware import RESULTS_PREFIX
from app.replicas.choosing import key_of

_MODELS: Final = "/models/"
_MOST_NAME_BYTES: Final = 4096
_NOTHING: Final = msgspec.Raw(b"")


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for.

    Attributes:
        model: As the request names it; empty where it names none.
        key: What it has in common with others, see ``choosing``; empty for nothing.
    """

    model: str = ""
    key: bytes = b""


class _Body(msgspec.Struct):
    """A request's JSON, of which nothing is read yet."""

    model: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    interventions: msgspec.Raw = _NOTHING
    cache_salt: msgspec.Raw = _NOTHING


def of_body(body: bytes | bytearray, key: bytes, *, prefix_bytes: int) -> Asked:
    """Return what a request in JSON asks for.

    Args:
        body: All of it.
        key: What the caller proves themselves with; caches of tenants are told apart by it.
        prefix_bytes: Requests whose prompts agree in so many bytes belong together; shorter ones go anywhere.
            0 for none.
    """
    try:
        found = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Asked()
    beginning = bytes(memoryview(found.messages or found.prompt)[:prefix_bytes])
    if not prefix_bytes or len(beginning) < prefix_bytes:
        return Asked(_name(found.model))
    # Not copied: they may be large.
    common: list[bytes | memoryview] = [
        key,
        memoryview(found.cache_salt),
        memoryview(found.interventions),
        beginning,
    ]
    return Asked(_name(found.model), key_of(common))


def split_path(path: str, models: Collection[str]) -> tuple[str, str]:
    """Return the model that a path names, empty if none, and the path as replicas have it.

    ``/models/NAME/v1/…`` asks for a model, so that whatever client is given such an address needs to know
    nothing of it.
    """
    rest = path.removeprefix(_MODELS)
    found = [name for name in models if path.startswith(_MODELS) and rest.startswith(f"{name}/")]
    model = max(found, key=len, default="")
    return model, rest.removeprefix(model) if model else path


def owner_of(path: str) -> str:
    """Return the replica that a path is of, empty where any will do: results' ids begin with it."""
    owner, has_owner, _ = path.removeprefix(RESULTS_PREFIX).partition(".")
    return owner if has_owner and path.startswith(RESULTS_PREFIX) else ""


def _name(raw: msgspec.Raw) -> str:
    if len(raw) > _MOST_NAME_BYTES:
        return ""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


__all__ = ["Asked", "of_body", "owner_of", "split_path"]
