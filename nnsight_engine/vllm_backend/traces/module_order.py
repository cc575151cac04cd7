"""The way that the model takes through its modules in a step, and where on it the taps lie.

Blocks that want nothing but layers' outputs can be served at the taps, in the compiled step, in which no
module's call is heard of. What the model has passed on its way to a tap is known all the same: it calls its
modules in the same order in every step, and that order is learnt once, when the engine starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

_BEHIND: Final = ("logits.output", "samples.output")
"""What is provided after the model has run, whichever way it ran."""


class UntappedError(Exception):
    """Blocks of the running step want what no tap provides: it has to run again, uncompiled."""


class ModuleOrder:
    """The order in which a model without branches passes its places.

    Args:
        root: The model's path.
        order: Every place in the order in which a step reaches it first.
        exits: The outputs of the layers, behind each of which a tap may lie; another may in the first layer.
        taps: The numbers of those in place, 0 the one in the first layer.
        entry: What the place at that one is called.

    Attributes:
        served: What blocks can have without hearing of modules.
        exits: The place at each tap.
        tap_at: The tap that each of these places has.
        last: The number of the last tap.
        order: Every place, in the order in which a step reaches it first.
        number_of: The place's number in this order.
        ahead: How many places a step has passed that comes to a tap; what the tap provides is not one yet.

    Raises:
        ValueError: Not all exits are on the way, or not in this order, or there is no tap.
    """

    def __init__(
        self, root: str, order: Sequence[str], exits: Sequence[str], taps: Collection[int], entry: str
    ) -> None:
        """Cut the way into pieces."""
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
