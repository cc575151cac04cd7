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


Asked = list[JsonObject] | Block
"""What one request asks for; no operations is a plain request."""

ForRequest = Callable[[int, Shape], Asked]
"""What a batch's n-th request on a model of a given shape asks for."""

Layers = Callable[[Shape], range]
"""Some of a model's layers."""


def middle(shape: Shape) -> range:
    """One layer, where everything happens that happens at one."""
    return range(shape.num_layers // 2, shape.num_layers // 2 + 1)


def every(shape: Shape) -> range:
    """All layers."""
    return range(shape.num_layers)


def lowest(number: int) -> Layers:
    """So many layers."""
    return lambda _shape: range(number)


def nothing(index: int, shape: Shape) -> Asked:
    """Ask for nothing."""
    del index, shape
    return []


def first_only(asks: ForRequest) -> ForRequest:
    """Let the first request ask, and no other."""
    return lambda index, shape: asks(index, shape) if index == 0 else []


def steered(layers: Layers, *, alike: bool = False) -> ForRequest:
    """Each request has a vector, the same for all of its layers: its own, or all the same."""

    def asks(index: int, shape: Shape) -> Asked:
        # Seeded by its place, so that every repetition has the same vectors.
        generator = np.random.default_rng(0 if alike else index)
        vector = generator.standard_normal(shape.hidden_size) * _VECTOR_SCALE
        return [{"op": "steer", "at": _outputs(layers(shape)), "vector": vector.tolist()}]

    return asks


def captured(layers: Layers, phase: str, reduce: str = "none") -> ForRequest:
    """Each request captures what layers return, of its prompt or of what it generates."""

    def asks(_index: int, shape: Shape) -> Asked:
        at = _outputs(layers(shape))
        return [{"op": "capture", "at": at, "where": {"phase": phase}, "reduce": reduce}]

    return asks


def lens(where: JsonObject) -> ForRequest:
    """Each request reads all layers by a lens, at some positions."""
    return lambda _index, _shape: [{"op": "logit_lens", "layers": "all", "top_k": 5, "where": where}]


def traced(layers: Layers) -> ForRequest:
    """Each request has a block that saves what layers return."""
    return lambda _index, shape: Block(layers(shape))


def _outputs(layers: range) -> str:
    return f"layers.{layers.start}:{layers.stop}.output"


__all__ = [
    "Asked",
    "Block",
    "ForRequest",
    "JsonObject",
    "Layers",
    "Shape",
    "captured",
    "every",
    "first_only",
    "lens",
    "lowest",
    "middle",
    "nothing",
    "steered",
    "traced",
]
