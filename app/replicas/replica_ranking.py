"""The choice of a request's replica: the one that has cached the prompt's prefix, unless it is too busy.

Each key orders all replicas by their names alone: several fronts agree, and adding one keeps the order of the
others. The first whose load exceeds the least by no more than ``slack`` is chosen ("consistent hashing with
bounded loads", Mirrokni, Thorup and Zadimoghaddam, 2018). Without a key: the less loaded of two random ones.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Final

_KEY_BYTES: Final = 16


def ranked(loads: Mapping[str, int], key: bytes, *, tried: Collection[str] = (), slack: int = 8) -> list[str]:
    """Return replicas in the order in which a request is offered to them; ``tried`` ones come last."""
    fresh = [name for name in loads if name not in tried] or list(loads)
    if not fresh:
        return []
    return _by_key(fresh, loads, key, slack) if key else _by_load(fresh, loads)


def key_of(parts: Sequence[bytes | memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _by_key(names: Sequence[str], loads: Mapping[str, int], key: bytes, slack: int) -> list[str]:
    order = sorted(names, key=lambda name: key_of([key, name.encode()]))
    most = min(loads[name] for name in names) + slack
    return [name for name in order if loads[name] <= most] + [name for name in order if loads[name] > most]


def _by_load(names: Sequence[str], loads: Mapping[str, int]) -> list[str]:
    order = random.sample(names, len(names))
    return [*sorted(order[:2], key=loads.__getitem__), *order[2:]]


__all__ = ["key_of", "ranked"]
