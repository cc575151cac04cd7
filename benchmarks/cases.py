"""What is compared with plain vLLM, and the ratio that each comparison has to reach.

A case is one question: decode throughput of one variant with so many requests, or time to first
token at one prompt length. Every case pairs an engine that can intervene with a plain one
doing the same work without interventions; the control pairs two plain ones.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

JsonObject = dict[str, Any]

TURN_STEPS: Final = 8
"""Decode steps that one engine runs before it is the other's turn."""

ANY_SIZE: Final = 0
"""Key of a target that holds for every number of requests."""

_LONG_PROMPT_REQUESTS: Final = 8
"""Requests that decode behind long prompts, at most: the short ones show how a batch's size matters."""

_VECTOR_SCALE: Final = 0.1
"""Size of the random vectors' entries: enough to change bits, too little to make the text collapse."""


class Quantity(enum.StrEnum):
    """What a case measures."""

    DECODE = "decode"
    FIRST_TOKEN = "first_token"  # noqa: S105 - not a password

    @property
    def unit(self) -> str:
        """Unit of the absolute numbers."""
        return "tokens/s" if self is Quantity.DECODE else "ms"


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """As much of the model as interventions need."""

    num_layers: int
    hidden_size: int

    @property
    def middle_layer(self) -> int:
        """Where everything happens that happens at one layer."""
        return self.num_layers // 2


class Block(enum.Enum):
    """Code that runs with a request."""

    SAVES_ONE_LAYER = enum.auto()
    """Saves one layer's output at each step."""


Asked = list[JsonObject] | Block
"""What one request asks for: operations, none for a plain request, or code."""

ForRequest = Callable[[int, Shape], Asked]
"""What a batch's n-th request on a model of a given shape asks for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way of using an engine that can intervene.

    Attributes:
        name: Its name in the tables.
        for_request: What each request of a batch asks for.
        targets: Ratio to plain vLLM to reach, by number of requests or ``ANY_SIZE``.
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

    @property
    def target(self) -> float | None:
        """Ratio to reach: at least for throughput, at most for time; None where none is set."""
        targets = self.variant.targets
        return targets.get(self.num_requests, targets.get(ANY_SIZE))

    def reached(self, ratio: float) -> bool | None:
        """Return whether a ratio reaches the target, None where none is set."""
        if self.target is None:
            return None
        is_rate = self.variant.quantity is Quantity.DECODE
        return ratio >= self.target if is_rate else ratio <= self.target


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


def _nothing(index: int, shape: Shape) -> list[JsonObject]:
    del index, shape
    return []


def _steered(seed: int, shape: Shape, at: str) -> list[JsonObject]:
    # Seeded, so that every repetition has the same vectors.
    vector = np.random.default_rng(seed).standard_normal(shape.hidden_size) * _VECTOR_SCALE
    return [{"op": "steer", "at": at, "vector": vector.tolist()}]


def _one_layer(shape: Shape) -> str:
    return f"layers.{shape.middle_layer}.output"


def _first_steered(index: int, shape: Shape) -> list[JsonObject]:
    return _steered(index, shape, _one_layer(shape)) if index == 0 else []


def _alike_steered(index: int, shape: Shape) -> list[JsonObject]:
    del index
    return _steered(0, shape, _one_layer(shape))


def _each_steered(index: int, shape: Shape) -> list[JsonObject]:
    return _steered(index, shape, _one_layer(shape))


def _each_steered_everywhere(index: int, shape: Shape) -> list[JsonObject]:
    return _steered(index, shape, "layers.*.output")


def _last_captured(index: int, shape: Shape) -> list[JsonObject]:
    del index, shape
    return [_capture("generated") | {"reduce": "last"}]


def _each_captured(index: int, shape: Shape) -> list[JsonObject]:
    del index, shape
    return [_capture("generated")]


def _prompt_captured(index: int, shape: Shape) -> list[JsonObject]:
    del index, shape
    return [_capture("prompt")]


def _capture(phase: str) -> JsonObject:
    return {"op": "capture", "at": "layers.*.output", "where": {"phase": phase}}


def _lens(index: int, shape: Shape) -> list[JsonObject]:
    del index, shape
    return [{"op": "logit_lens", "layers": "all", "top_k": 5, "where": {"phase": "generated"}}]


def _first_lens(index: int, shape: Shape) -> list[JsonObject]:
    return _lens(index, shape) if index == 0 else []


def _prompt_lens(index: int, shape: Shape) -> list[JsonObject]:
    del index, shape
    return [{"op": "logit_lens", "layers": "all", "top_k": 5, "where": {"positions": [-1]}}]


def _first_traced(index: int, shape: Shape) -> Asked:
    del shape
    return Block.SAVES_ONE_LAYER if index == 0 else []


def _each_traced(index: int, shape: Shape) -> Asked:
    del index, shape
    return Block.SAVES_ONE_LAYER


_LENS_BOUND: Final = (
    "A lens multiplies by the unembedding once for each layer and request, the step itself once for each "
    "request; in this small model that matrix has a fifth of all weights."
)
_TAPS_BOUND: Final = "What idle taps cost is mostly that the compiler cannot fuse across them."
_CAPTURE_BOUND: Final = "One copy at each layer and step, which nothing in the step would make otherwise."
_TRACE_BOUND: Final = (
    "Beside what idle taps cost, the model hands over to the block and back at each step, on its own thread."
)

VARIANTS: Final = (
    Variant("(control: plain vLLM again)", _nothing, control=True),
    Variant("idle", _nothing, {ANY_SIZE: 0.985}, bound=_TAPS_BOUND),
    Variant("one request steered", _first_steered, {8: 0.975}, bound=_TAPS_BOUND),
    Variant("every request steered alike, one layer", _alike_steered),
    Variant("every request its own vector, one layer", _each_steered, {64: 0.97}),
    Variant("every request its own vector, all layers", _each_steered_everywhere, {64: 0.93}),
    Variant("last token captured, all layers", _last_captured, {ANY_SIZE: 0.92}, bound=_CAPTURE_BOUND),
    Variant("every token captured, all layers", _each_captured),
    Variant("lens of one request, all layers", _first_lens, {ANY_SIZE: 0.60}, bound=_LENS_BOUND),
    Variant("lens of every request, all layers", _lens, {ANY_SIZE: 0.60}, max_requests=8, bound=_LENS_BOUND),
    Variant("one request traced, one layer saved", _first_traced, {8: 0.95}, bound=_TRACE_BOUND),
    Variant("every request traced, one layer saved", _each_traced),
    Variant("idle", _nothing, quantity=Quantity.FIRST_TOKEN),
    Variant("one steer", _first_steered, {ANY_SIZE: 1.10}, quantity=Quantity.FIRST_TOKEN),
    Variant("every token captured, all layers", _prompt_captured, quantity=Quantity.FIRST_TOKEN),
    Variant("lens of the last token, all layers", _prompt_lens, quantity=Quantity.FIRST_TOKEN),
)
