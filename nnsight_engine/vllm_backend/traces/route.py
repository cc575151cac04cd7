"""The way that the model takes through its modules in a step, and where on it the taps lie.

Blocks that want nothing but layers' outputs can be served at the taps, in the compiled step, in which no
module's call is heard of. What the model has passed on its way to a tap is known all the same: it calls its
modules in the same order in every step, and that order is learnt once, when the engine starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

_BEHIND: Final = ("logits.output", "samples.output")
"""What is provided after the model has run, whichever way it ran."""


class UntappedError(Exception):
    """Blocks of the running step want what no tap provides: it has to run again, uncompiled."""


class Route:
    """The order in which a model without branches passes its places.

    Args:
        root: The model's path.
        order: Every place in the order in which a step reaches it first.
        exits: The outputs of the layers, behind each of which a tap lies; another lies in the first layer.

    Attributes:
        served: What blocks can have without hearing of modules.
        exits: The place at each tap; none at the first.
        order: Every place, in the order in which a step reaches it first.
        number_of: The place's number in this order.
        ahead: How many places a step has passed that comes to a tap; what the tap provides is not one yet.

    Raises:
        ValueError: Not all exits are on the way, or not in this order.
    """

    def __init__(self, root: str, order: Sequence[str], exits: Sequence[str]) -> None:
        """Cut the way into pieces."""
        self.order = tuple(order)
        self.number_of: Mapping[str, int] = {place: number for number, place in enumerate(order)}
        number_of = self.number_of
        entrance = f"{exits[0].removesuffix('.output')}.input"
        missing = [place for place in (entrance, *exits) if place not in number_of]
        numbers = [number_of[place] for place in exits if place in number_of]
        if missing or numbers != sorted(numbers):
            raise ValueError(f"the model does not run its layers in order; it never reached {missing}")
        self.served: frozenset[str] = frozenset([*exits, "result", *(f"{root}.{name}" for name in _BEHIND)])
        self.exits: tuple[str | None, ...] = (None, *exits)
        self.ahead: tuple[int, ...] = (number_of[entrance] + 1, *numbers)

    @property
    def last(self) -> int:
        """The number of the last tap."""
        return len(self.exits) - 1
