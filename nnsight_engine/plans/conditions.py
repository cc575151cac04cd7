"""Conditions on scores of positions, as plain data.

All are causal: the state at a position depends on the scores of earlier positions and its own.
"""

from __future__ import annotations

from typing import Final

import msgspec

from nnsight_engine.core.detector import Form, Link
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.features import PlannedFeatures
from nnsight_engine.plans.sites import PlannedSite, forward_order

AND: Final = "and"
OR: Final = "or"
NOT: Final = "not"


class PlannedPart(msgspec.Struct, frozen=True, array_like=True):
    site: PlannedSite
    form: Form | None
    tensors: tuple[tuple[str, str], ...] = ()
    features: PlannedFeatures | None = None


class PlannedDetector(msgspec.Struct, frozen=True, omit_defaults=True):
    """A detector, see ``core.detector``; its parts are in the order of the forward pass."""

    parts: tuple[PlannedPart, ...]
    bias: float = 0.0
    link: Link = Link.IDENTITY

    @property
    def sites(self) -> tuple[PlannedSite, ...]:
        return tuple(part.site for part in self.parts)


class PlannedTest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A test of a detector's scores.

    It begins to hold where the reduced score, times ``sign``, is above ``threshold`` (also times ``sign``).
    It holds on while that is above ``threshold - hysteresis``, or for good if it latches. ``over`` says which
    scores are reduced: of the ``position``, of the ``prompt`` up to it, or of a ``window`` of ``length``
    positions that ends with it. ``is_next``: it decides for the position after the one that it reads.
    """

    detector: PlannedDetector
    threshold: float
    sign: int = 1
    over: str = "position"
    length: int = 1
    reduce: str = "max"
    latches: bool = False
    hysteresis: float = 0.0
    is_next: bool = False

    @property
    def has_history(self) -> bool:
        return self.over != "position" or self.latches or self.hysteresis > 0

    @property
    def has_slot(self) -> bool:
        return self.has_history or self.is_next


class PlannedCondition(msgspec.Struct, frozen=True):
    """Tests, joined by ``program``: numbers of tests, ``and``, ``or`` and ``not`` in postfix order."""

    tests: tuple[PlannedTest, ...]
    program: tuple[int | str, ...]

    @property
    def has_history(self) -> bool:
        return any(test.has_history for test in self.tests)

    def last_site(self, spec: ModelSpec) -> PlannedSite:
        """Return the site that the forward pass reaches last of those that its tests read."""
        return max(
            (test.detector.sites[-1] for test in self.tests), key=lambda site: forward_order(site, spec)
        )

    @property
    def has_slots(self) -> bool:
        return any(test.has_slot for test in self.tests)
