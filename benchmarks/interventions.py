"""The interventions of a benchmark's requests: operations, or a block that runs with a request.

Builders return a function of a request's number in its batch, so that every repetition has the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from benchmarks.dictionaries import random_dictionary

JsonObject = dict[str, Any]

_VECTOR_SCALE: Final = 0.1
"""Size of the random vectors' entries: enough to change bits, too little to make the text collapse."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of a model that interventions need."""

    num_layers: int
    hidden_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class SavedLayers:
    """A block that saves the outputs of these layers at each step."""

    layers: range


Content = list[JsonObject] | SavedLayers
"""The interventions of one request; a plain request has no operations."""

ContentOf = Callable[[int, LayerSizes], Content]
"""The interventions of a batch's n-th request on a model of a given shape."""

Layers = Callable[[LayerSizes], range]


def middle(shape: LayerSizes) -> range:
    """Return the layer in the middle."""
    return range(shape.num_layers // 2, shape.num_layers // 2 + 1)


def every(shape: LayerSizes) -> range:
    """Return all layers."""
    return range(shape.num_layers)


def lowest(number: int) -> Layers:
    """Return the first layers."""
    return lambda _shape: range(number)


def nothing(_index: int, _shape: LayerSizes) -> Content:
    """Leave every request plain."""
    return []


def first_only(content_of: ContentOf) -> ContentOf:
    """Leave all requests but the first plain."""
    return lambda index, shape: content_of(index, shape) if index == 0 else []


def steered(layers: Layers, *, alike: bool = False) -> ContentOf:
    """Steer each request by a vector of its own, or all by the same one, at these layers."""

    def content_of(index: int, shape: LayerSizes) -> Content:
        generator = np.random.default_rng(0 if alike else index)
        vector = generator.standard_normal(shape.hidden_size) * _VECTOR_SCALE
        return [{"op": "steer", "at": _outputs(layers(shape)), "vector": vector.tolist()}]

    return content_of


def conditional(layers: Layers, *, window: int = 0) -> ContentOf:
    """Steer each request by a vector of its own, under a condition of its own on the same point.

    Args:
        layers: The layers.
        window: Positions over which scores are averaged; 0 for the position's own score.
    """
    over = {"over": "window", "of": window, "reduce": "mean"} if window else {}

    def content_of(index: int, shape: LayerSizes) -> Content:
        generator = np.random.default_rng(index)
        vector, weights = generator.standard_normal((2, shape.hidden_size)) * _VECTOR_SCALE
        probe = {"at": f"layers.{layers(shape).start}.output", "weights": weights.tolist()}
        return [
            {
                "op": "steer",
                "at": _outputs(layers(shape)),
                "vector": vector.tolist(),
                "where": {"phase": "generated"},
                "when": {"probe": probe, "above": 0.0, **over},
            }
        ]

    return content_of


def top_features(layers: Layers) -> ContentOf:
    """Read the ten most active of 16 times as many features as the width, at each generated token."""

    def content_of(_index: int, shape: LayerSizes) -> Content:
        dictionary = random_dictionary(layers(shape).start, shape.hidden_size)
        return [{"op": "features", "dictionary": dictionary, "where": {"phase": "generated"}}]

    return content_of


def changed_features(layers: Layers) -> ContentOf:
    """Change three features of each request's own."""

    def content_of(index: int, shape: LayerSizes) -> Content:
        dictionary = random_dictionary(layers(shape).start, shape.hidden_size)
        changes = [{"feature": 3 * index + i, "mode": "add", "value": _VECTOR_SCALE} for i in range(3)]
        return [{"op": "feature", "dictionary": dictionary, "changes": changes}]

    return content_of


def captured(layers: Layers, phase: str, reduce: str = "none") -> ContentOf:
    """Capture these layers' outputs, of the prompt or of generated tokens."""
    rest = {"where": {"phase": phase}, "reduce": reduce}
    return lambda _index, shape: [{"op": "capture", "at": _outputs(layers(shape)), **rest}]


def lens(where: JsonObject) -> ContentOf:
    """Read all layers by the logit lens at some positions."""
    return lambda _index, _shape: [{"op": "logit_lens", "layers": "all", "top_k": 5, "where": where}]


def traced(layers: Layers) -> ContentOf:
    """Run a block that saves these layers' outputs."""
    return lambda _index, shape: SavedLayers(layers(shape))


def _outputs(layers: range) -> str:
    return f"layers.{layers.start}:{layers.stop}.output"
