"""What is compared with plain vLLM, and the ratio that each comparison has to reach.

A case is one question: decode throughput of one variant with so many requests, or time to first
token at one prompt length. Every case pairs an engine that can intervene with a plain one
doing the same work without interventions; the control pairs two plain ones.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

from benchmarks.asked import (
    ForRequest,
    JsonObject,
    captured,
    every,
    first_only,
    lens,
    middle,
    nothing,
    steered,
    traced,
)

TURN_STEPS: Final = 8
"""Decode steps that one engine runs before it is the other's turn."""

ANY_SIZE: Final = 0
"""Key of a target that holds for every number of requests."""

_LONG_PROMPT_REQUESTS: Final = 8
"""Requests that decode behind long prompts, at most: the short ones show how a batch's size matters."""


class Quantity(enum.StrEnum):
    """What a case measures."""

    DECODE = "decode"
    FIRST_TOKEN = "first_token"  # noqa: S105 - not a password

    @property
    def unit(self) -> str:
        """Unit of the absolute numbers."""
        return "tokens/s" if self is Quantity.DECODE else "ms"


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way of using an engine that can intervene.

    Attributes:
        name: Its name in the tables.
        for_request: What each request of a batch asks for.
        targets: Ratio to plain vLLM to reach, by number of requests or ``ANY_SIZE``; of throughput the
            compiled engine's.
        quantity: What is measured.
        max_requests: Most requests with which it is run; None is no limit.
        control: Whether a second plain engine runs it instead: how far its ratio is from 1 is the
            error of the whole measurement.
        bound: A sentence on what bounds it, told where a target was missed.
    """

    name: str
    for_request: ForRequest
    targets: dict[int, float] = dataclasses.field(default_factory=dict)
    quantity: Quantity = Quantity.DECODE
    max_requests: int | None = None
    control: bool = False
    bound: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        variant: What is done.
        num_requests: Requests in the batch.
        prompt_tokens: Tokens of each prompt.
    """

    variant: Variant
    num_requests: int
    prompt_tokens: int

    @property
    def key(self) -> str:
        """The case's name among all cases of a run."""
        variant = self.variant
        return f"{variant.quantity}/{variant.name}/{self.num_requests}/{self.prompt_tokens}"

    def target(self, mode: str) -> float | None:
        """Ratio to reach: at least for throughput, at most for time; None where none is set.

        Args:
            mode: ``eager`` or ``compiled``. Throughput has targets where the engine is compiled, as it is
                where throughput matters.
        """
        if self._is_rate and mode != "compiled":
            return None
        targets = self.variant.targets
        return targets.get(self.num_requests, targets.get(ANY_SIZE))

    def reached(self, ratio: float, mode: str) -> bool | None:
        """Return whether a ratio reaches the target, None where none is set."""
        target = self.target(mode)
        if target is None:
            return None
        return ratio >= target if self._is_rate else ratio <= target

    @property
    def _is_rate(self) -> bool:
        return self.variant.quantity is Quantity.DECODE


def all_cases(batches: Sequence[int], prompts: Sequence[int]) -> list[Case]:
    """Return every case.

    Args:
        batches: Numbers of requests that decode together.
        prompts: Prompt lengths. Every batch decodes behind the shortest; behind longer ones only the largest
            batch of few requests does, since what they change is attention's share of a step.
    """
    first = [
        Case(variant, 1, length)
        for variant in VARIANTS
        if variant.quantity is Quantity.FIRST_TOKEN
        for length in prompts
    ]
    decode = [
        Case(variant, batch, length)
        for variant in VARIANTS
        if variant.quantity is Quantity.DECODE
        for length in prompts
        for batch in (batches if length == min(prompts) else _long_batches(batches))
        if variant.max_requests is None or batch <= variant.max_requests
    ]
    return decode + first


def _long_batches(batches: Sequence[int]) -> list[int]:
    few = [batch for batch in batches if batch <= _LONG_PROMPT_REQUESTS]
    return [max(few)] if few else []


_GENERATED: Final[JsonObject] = {"phase": "generated"}
_LAST: Final[JsonObject] = {"positions": [-1]}
_LENS_BOUND: Final = (
    "A lens multiplies by the unembedding once for each layer and request, the step itself once for each "
    "request; in this small model that matrix has a fifth of all weights."
)
_TAPS_BOUND: Final = "What idle taps cost is mostly that the compiler cannot fuse across them."
_CAPTURE_BOUND: Final = "One copy at each layer and step, which nothing in the step would make otherwise."
_TRACE_BOUND: Final = (
    "The model's thread hands over to the block's and back twice in each step, on cores that the model has "
    "busy; the switches are a third of it, the rest some 400 calls of Python per step, with cold caches."
)

VARIANTS: Final = (
    Variant("(control: plain vLLM again)", nothing, control=True),
    Variant("idle", nothing, {ANY_SIZE: 0.985}, bound=_TAPS_BOUND),
    Variant("one request steered", first_only(steered(middle)), {8: 0.975}, bound=_TAPS_BOUND),
    Variant("every request steered alike, one layer", steered(middle, alike=True)),
    Variant("every request its own vector, one layer", steered(middle), {64: 0.97}),
    Variant("every request its own vector, all layers", steered(every), {64: 0.93}),
    Variant(
        "last token captured, all layers",
        captured(every, "generated", "last"),
        {ANY_SIZE: 0.92},
        bound=_CAPTURE_BOUND,
    ),
    Variant("every token captured, all layers", captured(every, "generated")),
    Variant(
        "lens of one request, all layers", first_only(lens(_GENERATED)), {ANY_SIZE: 0.60}, bound=_LENS_BOUND
    ),
    Variant(
        "lens of every request, all layers",
        lens(_GENERATED),
        {ANY_SIZE: 0.60},
        max_requests=8,
        bound=_LENS_BOUND,
    ),
    Variant("one request traced, one layer saved", first_only(traced(middle)), {8: 0.95}, bound=_TRACE_BOUND),
    Variant("every request traced, one layer saved", traced(middle)),
    Variant("idle", nothing, quantity=Quantity.FIRST_TOKEN),
    Variant("one steer", steered(middle), {ANY_SIZE: 1.10}, quantity=Quantity.FIRST_TOKEN),
    Variant("every token captured, all layers", captured(every, "prompt"), quantity=Quantity.FIRST_TOKEN),
    Variant("lens of the last token, all layers", lens(_LAST), quantity=Quantity.FIRST_TOKEN),
)
