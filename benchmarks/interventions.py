"""What a request of a benchmark asks for: operations, or code that runs with it.

Builders return what each request of a batch asks for, so that every repetition asks the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np

JsonObject = dict[str, Any]

_VECTOR_SCALE: Final = 0.1
"""Size of the random vectors' entries: enough to change bits, too little to make the text collapse."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """As much of the model as interventions need."""

    num_layers: int
    hidden_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Code that saves the outputs of these layers at each step."""

    layers: range


Content = list[JsonObject] | Block
"""What one request asks for; no operations is a plain request."""

OperationsOf = Callable[[int, Shape], Content]
"""What a batch's n-th request on a model of a given shape asks for."""

Layers = Callable[[Shape], range]


def middle(shape: Shape) -> range:
    """Return the layer in the middle."""
    return range(shape.num_layers // 2, shape.num_layers // 2 + 1)


def every(shape: Shape) -> range:
    """Return all layers."""
    return range(shape.num_layers)


def lowest(number: int) -> Layers:
    """Return the first layers."""
    return lambda _shape: range(number)


def nothing(_index: int, _shape: Shape) -> Content:
    """Leave every request plain."""
    return []


def first_only(operations_of: OperationsOf) -> OperationsOf:
    """Leave all requests but the first plain."""
    return lambda index, shape: operations_of(index, shape) if index == 0 else []


def steered(layers: Layers, *, alike: bool = False) -> OperationsOf:
    """Steer each request by a vector of its own, or all by the same one, at these layers."""

    def operations_of(index: int, shape: Shape) -> Content:
        # Seeded by the index, so that every repetition has the same vectors.
        generator = np.random.default_rng(0 if alike else index)
        vector = generator.standard_normal(shape.hidden_size) * _VECTOR_SCALE
        return [{"op": "steer", "at": _outputs(layers(shape)), "vector": vector.tolist()}]

    return operations_of


def captured(layers: Layers, phase: str, reduce: str = "none") -> OperationsOf:
    """Capture these layers' outputs, of the prompt or of generated tokens."""
    rest = {"where": {"phase": phase}, "reduce": reduce}
    return lambda _index, shape: [{"op": "capture", "at": _outputs(layers(shape)), **rest}]


def lens(where: JsonObject) -> OperationsOf:
    """Read all layers by the logit lens at some positions."""
    return lambda _index, _shape: [{"op": "logit_lens", "layers": "all", "top_k": 5, "where": where}]


def traced(layers: Layers) -> OperationsOf:
    """Run a block that saves these layers' outputs."""
    return lambda _index, shape: Block(layers(shape))


def _outputs(layers: range) -> str:
    return f"layers.{layers.start}:{layers.stop}.output"
