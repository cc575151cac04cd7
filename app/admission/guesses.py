"""How many keys that nobody has seen yet one place may bring: each costs a slow hash, and everybody's time.

A place is a client's address, of IPv6 the network that a client has to itself. What turns out to be a key is
not counted, and keys that are known are never asked about, so that guesses from one place cost others nothing
but their first use from that same place. ``auth.keys`` asks before it hashes.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable
from typing import Final

from app.admission.rates import ThrottledError

_MOST: Final = 200.0
_PER_S: Final = 1.0
_MAX_PLACES: Final = 10_000
_IPV6_NETWORK: Final = 64


class Guesses:
    """Counts what places bring: two hundred at once, then one a second.

    Args:
        clock: Seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know no place."""
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, address: str) -> str:
        """Count one more from an address; returns its place, for ``give_back``.

        Raises:
            ThrottledError: It has brought too many.
        """
        place = _place_of(address)
        left, moment = self._now(place), self._clock()
        if left < 1:
            raise ThrottledError(
                "Too many keys that are none have come from this address: send this one again later, or one "
                "that this server has seen.",
                {"Retry-After": str(math.ceil((1 - left) / _PER_S))},
            )
        if place not in self._left and len(self._left) >= _MAX_PLACES:
            self._forget()
        self._left[place] = left - 1, moment
        return place

    def give_back(self, place: str) -> None:
        """Do not count the last one: it was a key."""
        self._left[place] = min(_MOST, self._now(place) + 1), self._clock()

    def _now(self, place: str) -> float:
        left, moment = self._left.get(place, (_MOST, self._clock()))
        return min(_MOST, left + (self._clock() - moment) * _PER_S)

    def _forget(self) -> None:
        """Forget places that may bring as many as any, or all, where so many others are left."""
        self._left = {place: one for place, one in self._left.items() if self._now(place) < _MOST}
        if len(self._left) >= _MAX_PLACES:
            self._left.clear()


def _place_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address  # a socket's client has none
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed.packed, _IPV6_NETWORK), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


__all__ = ["Guesses"]
