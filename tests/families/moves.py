"""One change for every standard point, to be made by a trace or by hooks, and the points to make it at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

LAYER: Final = 1
"""The layer whose points stand for those of all layers."""


def moved(value: torch.Tensor) -> torch.Tensor:
    """Return a value changed, in the same way whatever its shape."""
    return value * 0.5 + 1


def move(value: torch.Tensor) -> None:
    """Change a value likewise, in place."""
    value.mul_(0.5).add_(1)


def points_of_a_layer(names: Iterable[str]) -> list[str]:
    """Return a model's own points, and each leaf of ``LAYER``, or of the first layer that has it.

    Points are in the order given.
    """
    given = list(names)
    layers: dict[str, int] = {}
    for name in given:
        if name.startswith("layers."):
            _, layer, leaf = name.split(".", 2)
            if leaf not in layers or int(layer) == LAYER:
                layers[leaf] = int(layer)
    chosen = {f"layers.{layer}.{leaf}" for leaf, layer in layers.items()}
    return [name for name in given if not name.startswith("layers.") or name in chosen]
