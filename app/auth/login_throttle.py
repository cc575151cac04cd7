"""Limits invalid keys per key id and client network, an IPv4 address or an IPv6 /64.

A valid key is never affected by invalid ones: a key is counted only after it was found invalid.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable
from typing import Final

from app.refusals import ThrottledError

_BURST: Final = 200.0
_PER_S: Final = 1.0
_MAX_ENTRIES: Final = 10_000
_IPV6_NETWORK: Final = 64

_Source = tuple[str, str]


class LoginThrottle:
    """Counts invalid keys: a burst of 200 per id and network, then one per second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allowances: dict[_Source, tuple[float, float]] = {}

    def count(self, key_id: str, address: str) -> None:
        source = key_id, _network_of(address)
        remaining, moment = self._remaining(source), self._clock()
        if remaining < 1:
            raise ThrottledError(
                "Too many wrong keys with this id came from this address: send a valid one, or wait.",
                {"Retry-After": str(math.ceil((1 - remaining) / _PER_S))},
            )
        if source not in self._allowances and len(self._allowances) >= _MAX_ENTRIES:
            self._evict()
        self._allowances[source] = remaining - 1, moment

    def _remaining(self, source: _Source) -> float:
        remaining, moment = self._allowances.get(source, (_BURST, self._clock()))
        return min(_BURST, remaining + (self._clock() - moment) * _PER_S)

    def _evict(self) -> None:
        """Drop entries whose allowance is full again, or all if too many remain."""
        self._allowances = {
            source: one for source, one in self._allowances.items() if self._remaining(source) < _BURST
        }
        if len(self._allowances) >= _MAX_ENTRIES:
            self._allowances.clear()


def _network_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address  # a client on a Unix socket has no address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed.packed, _IPV6_NETWORK), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


__all__ = ["LoginThrottle"]
