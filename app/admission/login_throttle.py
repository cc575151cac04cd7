"""How many wrong keys are told that they are wrong: guesses at one key from one place, and no others.

A place is a client's address, of IPv6 the network that a client has to itself. Whoever guesses is refused in
words that ask for patience; a right key is never asked how many wrong ones came before it, from wherever it
comes. ``auth.keys`` counts a key after it has looked at it.
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

_Place = tuple[str, str]


class LoginThrottle:
    """Counts wrong keys: two hundred at once for each id and place, then one a second.

    Args:
        clock: Seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know no place."""
        self._clock = clock
        self._left: dict[_Place, tuple[float, float]] = {}

    def count(self, key_id: str, address: str) -> None:
        """Count a wrong key of this id from an address.

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


__all__ = ["LoginThrottle"]
