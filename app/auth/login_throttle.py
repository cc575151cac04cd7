"""Throttles guesses at keys: limits invalid keys per key id and client network.

The network is the client's IPv4 address, or its IPv6 /64. Guesses beyond the limit are rejected with a
request to wait. A valid key is never affected by invalid ones, whatever its origin: ``auth.keys`` counts a
key only after it was checked and found invalid.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable
from typing import Final

from app.refusals import ThrottledError

_MOST: Final = 200.0
_PER_S: Final = 1.0
_MAX_PLACES: Final = 10_000
_IPV6_NETWORK: Final = 64

_Place = tuple[str, str]


class LoginThrottle:
    """Counts invalid keys: a burst of 200 per id and network, then one per second.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: dict[_Place, tuple[float, float]] = {}

    def count(self, key_id: str, address: str) -> None:
        """Count an invalid key with this id from an address.

        Raises:
            ThrottledError: There were too many.
        """
        place = key_id, _place_of(address)
        left, moment = self._now(place), self._clock()
        if left < 1:
            raise ThrottledError(
                "Too many wrong keys of this id have come from this address: send a right one, or wait.",
                {"Retry-After": str(math.ceil((1 - left) / _PER_S))},
            )
        if place not in self._left and len(self._left) >= _MAX_PLACES:
            self._forget()
        self._left[place] = left - 1, moment

    def _now(self, place: _Place) -> float:
        left, moment = self._left.get(place, (_MOST, self._clock()))
        return min(_MOST, left + (self._clock() - moment) * _PER_S)

    def _forget(self) -> None:
        """Drop entries whose allowance is full again, or all if too many are left."""
        self._left = {place: one for place, one in self._left.items() if self._now(place) < _MOST}
        if len(self._left) >= _MAX_PLACES:
            self._left.clear()


def _place_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address  # a client on a Unix socket has no address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed.packed, _IPV6_NETWORK), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


__all__ = ["LoginThrottle"]
