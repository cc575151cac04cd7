"""Views that select a point's part of a module's tensor, so that in-place edits reach the model.

Only the last axis is split, which yields a view for any strides. ``architecture`` chooses the view of
each leaf, and points apply it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import torch

_NUM_PROJECTIONS: Final = 3  # q, k and v


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A view of a part of a tensor.

    Attributes:
        part: Returns the part of the whole, sharing its memory.
        is_all: Whether the part has all numbers of the whole, possibly in another shape.
    """

    part: Callable[[torch.Tensor], torch.Tensor]
    is_all: bool = True

    def joined(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return the whole with the part replaced; ``whole`` itself is not changed."""
        if self.is_all:
            return part.reshape(whole.shape)
        new = whole.clone()
        self.part(new).copy_(part)
        return new


def _unchanged(whole: torch.Tensor) -> torch.Tensor:
    return whole


WHOLE: Final = View(_unchanged)


def heads(num_heads: int) -> View:
    """Return the view ``[..., heads, head_dim]`` of ``[..., heads * head_dim]``."""
    return View(lambda whole: whole.unflatten(-1, (num_heads, -1)))


def fused_heads(index: int, num_heads: Sequence[int]) -> View:
    """Return the view ``[..., heads, head_dim]`` of one of several concatenated projections.

    Args:
        index: Index of the projection.
        num_heads: Number of heads of each projection; all heads have the same size.
    """
    start, count = sum(num_heads[:index]), num_heads[index]
    total = sum(num_heads)

    def part(whole: torch.Tensor) -> torch.Tensor:
        size = whole.shape[-1] // total
        columns = whole.narrow(-1, start * size, count * size)
        return columns.view(*columns.shape[:-1], count, size)

    return View(part, is_all=False)


def fused_per_head(index: int, num_heads: int) -> View:
    """Return the view ``[..., heads, head_dim]`` of q, k or v, which are interleaved per head."""
    return View(
        lambda whole: whole.unflatten(-1, (num_heads, _NUM_PROJECTIONS, -1))[..., index, :], is_all=False
    )


def before_gates(num_heads: int) -> View:
    """Return the view ``[..., heads, head_dim]`` of ``[..., heads * 2 * head_dim]``, without the gates."""
    return View(lambda whole: whole.unflatten(-1, (num_heads, 2, -1))[..., 0, :], is_all=False)


def half(index: int) -> View:
    """Return the view of the first (0) or the second (1) half."""

    def part(whole: torch.Tensor) -> torch.Tensor:
        size = whole.shape[-1] // 2
        return whole.narrow(-1, index * size, size)

    return View(part, is_all=False)
