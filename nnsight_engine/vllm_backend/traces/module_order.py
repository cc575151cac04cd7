"""The order in which the model passes its modules in a step, and the position of the taps in it.

Module calls are not observed in a compiled step. But the model calls its modules in the same order in every
step, so the order, recorded once when the engine starts, tells which places lie before a tap.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

_BEHIND: Final = ("logits.output", "samples.output")
"""Places whose values are provided after the model has run, in compiled and eager steps alike."""


class UntappedError(Exception):
    """Blocks of the running step need a value that no tap provides; the step must run again, uncompiled."""


class ModuleOrder:
    """The order in which a model without branches passes its places; ValueError if exits are out of order.

    Args:
        order: All places, in the order in which a step first reaches them.
        exits: The outputs of the layers. A tap may lie behind each of them, and another in the first layer.
        taps: The numbers of the installed taps; 0 is the tap in the first layer, at the place ``entry``.

    Attributes:
        served: The providers whose values blocks can have without module calls being observed.
        ahead: The number of places that a step has passed when it reaches a tap, without the tap's own place.
    """

    def __init__(
        self, root: str, order: Sequence[str], exits: Sequence[str], taps: Collection[int], entry: str
    ) -> None:
        entrance = f"{exits[0].removesuffix('.output')}.input"
        order = [both for place in order for both in ((place, entry) if place == entrance else (place,))]
        places = (entry, *exits)
        number_of = {place: number for number, place in enumerate(order)}
        missing = [place for place in places if place not in number_of]
        ahead = [number_of[place] for place in places if place in number_of]
        if missing or ahead != sorted(ahead):
            raise ValueError(f"the model does not run its layers in order; it never reached {missing}")
        self.order = tuple(order)
        self.number_of: Mapping[str, int] = number_of
        self.exits = {tap: places[tap] for tap in taps}
        self.tap_at = {place: tap for tap, place in self.exits.items()}
        self.ahead = {tap: ahead[tap] for tap in taps}
        self.last = max(taps)
        behind = (f"{root}.{name}" for name in _BEHIND)
        self.served = frozenset([*self.exits.values(), "result", *behind])
