"""Which replica a request goes to: the one that has its prompt's beginning cached, unless it has much to do.

Each key has an order of all replicas that depends on nothing but their names, so that any number of fronts
agree without talking, and a replica that comes or goes changes the order of the others not at all. The first
that has not much more to do than the least busy one is taken ("consistent hashing with bounded loads",
Mirrokni, Thorup and Zadimoghaddam, 2018), so what one replica is too busy for goes to one other and is cached
there, not everywhere. Requests without a key go to the less busy of two chosen at random.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Final

_KEY_BYTES: Final = 16


def ranked(loads: Mapping[str, int], key: bytes, *, tried: Collection[str] = (), slack: int = 8) -> list[str]:
    """Return the names of replicas in the order in which they are asked to take a request.

    Args:
        loads: What each has to do, in requests.
        key: What requests have in common that gain by the same replica; empty for nothing.
        tried: Those that could not; they come last.
        slack: How many more requests than the least busy one has the preferred may have.
    """
    fresh = [name for name in loads if name not in tried] or list(loads)
    if not fresh:
        return []
    return _by_key(fresh, loads, key, slack) if key else _by_load(fresh, loads)


def key_of(parts: Sequence[bytes | memoryview]) -> bytes:
    """Return a key for requests that have all of these in common."""
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
