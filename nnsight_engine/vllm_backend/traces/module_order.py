"""The order in which the model passes its modules in a step, and the position of the taps in it.

Blocks that only need outputs of layers can be served at the taps, in the compiled step, in which calls of
modules are not observed. The places that the model has passed on its way to a tap are known all the same: the
model calls its modules in the same order in every step, and that order is recorded once, when the engine
starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

_BEHIND: Final = ("logits.output", "samples.output")
"""Places whose values are provided after the model has run, in compiled and eager steps alike."""


class UntappedError(Exception):
    """Blocks of the running step need a value that no tap provides; the step must run again, uncompiled."""


class ModuleOrder:
    """The order in which a model without branches passes its places.

    Args:
        root: The model's path.
        order: All places, in the order in which a step first reaches them.
        exits: The outputs of the layers. A tap may lie behind each of them, and another in the first layer.
        taps: The numbers of the installed taps; 0 is the tap in the first layer.
        entry: The name of the place at tap 0.

    Attributes:
        served: The providers whose values blocks can have without calls of modules being observed.
        exits: The place at each tap.
        tap_at: The tap at each of these places.
        last: The number of the last tap.
        order: All places, in the order in which a step first reaches them.
        number_of: The index of each place in this order.
        ahead: The number of places that a step has passed when it reaches a tap, without the tap's own place.

    Raises:
        ValueError: An exit is not in the order, or the exits are out of order, or there is no tap.
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
