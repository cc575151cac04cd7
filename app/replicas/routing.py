"""The choice of a request's replica: the one that has cached the prompt's prefix, unless it is too busy.

Requests whose prompts begin alike have the same key. Each key orders all replicas by their names alone:
several fronts agree, and adding one keeps the order of the others. The first whose load exceeds the least by
no more than ``slack`` is chosen ("consistent hashing with bounded loads", Mirrokni, Thorup and Zadimoghaddam,
2018). Without a key: the less loaded of two random ones.

Model and key are read from the body, parsed once and at the top level only. A malformed body yields neither;
the replica rejects it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from app.http.gate import RESULTS_PREFIX

_KEY_BYTES: Final = 16


def ranked(loads: Mapping[str, int], key: bytes, *, tried: Collection[str] = (), slack: int = 8) -> list[str]:
    """Return replicas in the order in which a request is offered to them; ``tried`` ones come last."""
    fresh = [name for name in loads if name not in tried] or list(loads)
    if not fresh:
        return []
    return _by_key(fresh, loads, key, slack) if key else _by_load(fresh, loads)


def key_of(parts: Sequence[bytes | memoryview]) -> bytes:
    """Return a hash of the parts; their lengths are hashed too, so that none can pass for another's end."""
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _by_key(names: Sequence[str], loads: Mapping[str, int], key: bytes, slack: int) -> list[str]:
    """Return replicas in the order that the key gives them, those with too many requests last."""
    order = sorted(names, key=lambda name: key_of([key, name.encode()]))
    max_load = min(loads[name] for name in names) + slack
    return [name for name in order if loads[name] <= max_load] + [
        name for name in order if loads[name] > max_load
    ]


def _by_load(names: Sequence[str], loads: Mapping[str, int]) -> list[str]:
    order = random.sample(names, len(names))
    return [*sorted(order[:2], key=loads.__getitem__), *order[2:]]


_MODELS: Final = "/models/"
_MAX_NAME_BYTES: Final = 4096
_NOTHING: Final = msgspec.Raw(b"")


@dataclasses.dataclass(frozen=True, slots=True)
class RequestRoute:
    """The model that the request names, and its key for ``ranked``; both may be empty."""

    model: str = ""
    key: bytes = b""


class _Body(msgspec.Struct):
    model: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    interventions: msgspec.Raw = _NOTHING
    cache_salt: msgspec.Raw = _NOTHING


def route_of_body(body: bytes | bytearray, key: bytes, *, prefix_bytes: int) -> RequestRoute:
    """Return the routing properties of a whole JSON body.

    Args:
        key: The caller's credential, which separates the caches of tenants.
        prefix_bytes: Requests whose prompts share this many bytes get the same key; shorter prompts get none.
            0 disables keys.
    """
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return RequestRoute()
    beginning = bytes(memoryview(fields.messages or fields.prompt)[:prefix_bytes])
    if not prefix_bytes or len(beginning) < prefix_bytes:
        return RequestRoute(_name(fields.model))
    # Not copied: they may be large.
    common: list[bytes | memoryview] = [
        key,
        memoryview(fields.cache_salt),
        memoryview(fields.interventions),
        beginning,
    ]
    return RequestRoute(_name(fields.model), key_of(common))


def split_path(path: str, models: Collection[str]) -> tuple[str, str]:
    """Return the model of ``/models/NAME/v1/…``, empty if none, and the path without it."""
    rest = path.removeprefix(_MODELS)
    candidates = [name for name in models if path.startswith(_MODELS) and rest.startswith(f"{name}/")]
    model = max(candidates, key=len, default="")
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
