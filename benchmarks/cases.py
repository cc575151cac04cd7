"""What is compared with plain vLLM, and the ratio that each comparison has to reach.

A case is one question: decode throughput of one variant at one batch size, or time to first
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
ForRequest = Callable[[int, "Shape"], list[JsonObject]]
"""The interventions of the batch's n-th request on a model of a given shape."""

PROMPT_LENGTHS: Final = (128, 512)
"""Tokens of the prompts whose first token is timed."""

TURN_STEPS: Final = 8
"""Decode steps that one engine runs before it is the other's turn."""

ANY_BATCH: Final = 0
"""Key of a target that holds for every batch size."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way of using an engine that can intervene.

    Attributes:
        name: Its name in the tables.
        targets: Ratio to plain vLLM to reach, by batch size or ``ANY_BATCH``.
        for_request: The interventions of each request of a batch.
        control: Whether a second plain engine runs it instead: how far its ratio is from 1 is the
            error of the whole measurement.
    """

    name: str
    targets: dict[int, float]
    for_request: ForRequest
    control: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        name: The variant's name.
        quantity: What is measured.
        size: Requests in the batch, or tokens of the prompt where the first token is timed.
        target: Ratio to reach: at least for throughput, at most for time; None where none is set.
        for_request: The interventions of each request.
        control: As in ``Variant``.
    """

    name: str
    quantity: Quantity
    size: int
    target: float | None
    for_request: ForRequest
    control: bool = False

    @property
    def key(self) -> str:
        """The case's name among all cases of a run."""
        return f"{self.quantity}/{self.name}/{self.size}"

    def reached(self, ratio: float) -> bool | None:
        """Return whether a ratio reaches the target, None where none is set."""
        if self.target is None:
            return None
        return ratio >= self.target if self.quantity is Quantity.DECODE else ratio <= self.target


def all_cases(batches: Sequence[int]) -> list[Case]:
    """Return every case for these batch sizes."""
    decode = [
        Case(
            variant.name,
            Quantity.DECODE,
            batch,
            variant.targets.get(batch, variant.targets.get(ANY_BATCH)),
            variant.for_request,
            variant.control,
        )
        for variant in VARIANTS
        for batch in batches
    ]
    first = [
        Case("one steer", Quantity.FIRST_TOKEN, length, 1.10, _first_steered) for length in PROMPT_LENGTHS
    ]
    return decode + first


def _nothing(index: int, shape: Shape) -> list[JsonObject]:
    del index, shape
    return []


def _steer(index: int, shape: Shape, at: str) -> list[JsonObject]:
    # Seeded by its place, so that every request has its own vector and every repetition the same ones.
    vector = np.random.default_rng(index).standard_normal(shape.hidden_size) * _VECTOR_SCALE
    return [{"op": "steer", "at": at, "vector": vector.tolist()}]


def _one_layer(shape: Shape) -> str:
    return f"layers.{shape.num_layers // 2}.output"


def _first_steered(index: int, shape: Shape) -> list[JsonObject]:
    return _steer(index, shape, _one_layer(shape)) if index == 0 else []


def _each_steered(index: int, shape: Shape) -> list[JsonObject]:
    return _steer(index, shape, _one_layer(shape))


def _each_steered_everywhere(index: int, shape: Shape) -> list[JsonObject]:
    return _steer(index, shape, "layers.*.output")


def _each_captured(index: int, shape: Shape) -> list[JsonObject]:
    del index, shape
    where = {"phase": "generated"}
    return [{"op": "capture", "at": "layers.*.output", "reduce": "last", "where": where}]


VARIANTS: Final = (
    Variant("(control: plain vLLM again)", {}, _nothing, control=True),
    Variant("idle", {ANY_BATCH: 0.98}, _nothing),
    Variant("one request steered", {8: 0.97, 32: 0.97}, _first_steered),
    Variant("every request its own vector, one layer", {32: 0.96}, _each_steered),
    Variant("every request its own vector, all layers", {32: 0.90}, _each_steered_everywhere),
    Variant("last token captured, all layers", {ANY_BATCH: 0.90}, _each_captured),
)
