"""Whether a step can be served at the taps: the order of the model's modules, and a prediction.

Module calls are not observed in a compiled step. But the model calls its modules in the same order in every
step, so the order, recorded once when the engine starts, tells which places lie before a tap. What a block
will need is predicted from earlier requests with the same block. Without that, a need for a value inside a
layer is only discovered at a tap, and the step has to run twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import CodeType
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


_MAX_KNOWN: Final = 256
"""Maximum number of blocks; beyond it the oldest are evicted."""


class TierPredictor:
    """The blocks that needed a value that no tap provides, in the first step of their latest request."""

    def __init__(self) -> None:
        self._elsewhere: dict[CodeType, None] = {}

    def expects_modules(self, block: CodeType) -> bool:
        return block in self._elsewhere

    def note(self, block: CodeType, *, elsewhere: bool) -> None:
        self._elsewhere.pop(block, None)
        if elsewhere:
            self._elsewhere[block] = None
            if len(self._elsewhere) > _MAX_KNOWN:
                del self._elsewhere[next(iter(self._elsewhere))]
