"""Conditions on scores of positions, as plain data, and their evaluation.

A test compares a reduction of a detector's scores with a threshold; a condition joins tests. All are causal:
the state at a position depends on the scores of earlier positions and its own.
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
    """A part of a detector.

    Attributes:
        site: The site that it reads.
        form: Its form; None for the activation of a feature.
        tensors: Name and key of each of its tensors.
        features: The feature.
    """

    site: PlannedSite
    form: Form | None
    tensors: tuple[tuple[str, str], ...] = ()
    features: PlannedFeatures | None = None


class PlannedDetector(msgspec.Struct, frozen=True, omit_defaults=True):
    """A detector as the worker receives it, see ``core.detector``.

    Its parts are in the order of the forward pass.
    """

    parts: tuple[PlannedPart, ...]
    bias: float = 0.0
    link: Link = Link.IDENTITY

    @property
    def sites(self) -> tuple[PlannedSite, ...]:
        """The sites that it reads."""
        return tuple(part.site for part in self.parts)


class PlannedTest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A test of a detector's scores.

    It begins to hold where the reduced score, times ``sign``, is above ``threshold``. It holds on while that
    is above ``threshold - hysteresis``, or for good if it latches.

    Attributes:
        detector: The detector.
        threshold: The threshold, times ``sign``.
        sign: 1 for a test for high scores, -1 for low ones.
        over: The scores that are reduced: that of the ``position``, those of the ``prompt`` up to it, or of
            a ``window`` that ends with it.
        length: Number of positions of the window.
        reduce: ``max`` or ``mean`` of the scores times ``sign``.
        latches: Whether it holds to the end once it holds.
        hysteresis: See above.
        is_next: Whether it decides for the position after the one that it reads.
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
        """Whether the state at a position depends on scores of earlier ones."""
        return self.over != "position" or self.latches or self.hysteresis > 0

    @property
    def has_slot(self) -> bool:
        """Whether the worker keeps scores and states of all positions."""
        return self.has_history or self.is_next


class PlannedCondition(msgspec.Struct, frozen=True):
    """Tests and how they are joined.

    Attributes:
        tests: The tests.
        program: Numbers of tests, ``and``, ``or`` and ``not`` in postfix order.
    """

    tests: tuple[PlannedTest, ...]
    program: tuple[int | str, ...]

    @property
    def has_history(self) -> bool:
        """Whether any test depends on scores of earlier positions."""
        return any(test.has_history for test in self.tests)

    def last_site(self, spec: ModelSpec) -> PlannedSite:
        """Return the site that the forward pass reaches last of those that its tests read."""
        return max(
            (test.detector.sites[-1] for test in self.tests), key=lambda site: forward_order(site, spec)
        )

    @property
    def has_slots(self) -> bool:
        """Whether the worker keeps scores or states of any test."""
        return any(test.has_slot for test in self.tests)
