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
    """Return a model's own points and those of ``LAYER``, in the order given."""
    return [name for name in names if not name.startswith("layers.") or f"layers.{LAYER}." in name]
