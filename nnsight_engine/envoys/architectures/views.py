"""Views of a point's part of a module's tensor; a part that cannot be a view is a copy, put back later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import torch

Part = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A view of a part of a tensor.

    Attributes:
        is_all: Whether the part has all numbers of the whole, possibly in another shape.
        is_copy: Whether the part does not share the memory of the whole.
        columns: Returns the same numbers of the whole in its memory, if ``part`` does not.
    """

    part: Part
    is_all: bool = True
    is_copy: bool = False
    columns: Part | None = None

    def joined(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return the whole with the part replaced; ``whole`` itself is not changed."""
        if self.is_all:
            joined = part.reshape(whole.shape)
            return joined.clone() if self.is_copy else joined
        new = whole.clone()
        columns = (self.columns or self.part)(new)
        columns.copy_(part.reshape(columns.shape))
        return new


def _unchanged(whole: torch.Tensor) -> torch.Tensor:
    return whole


WHOLE: Final = View(_unchanged)
COPY: Final = View(torch.clone, is_copy=True)
"""The whole where the model goes on to change it in place, so that a reader has a tensor of its own."""


def heads(num_heads: int) -> View:
    """Return the view ``[..., heads, head_dim]`` of ``[..., heads * head_dim]``."""
    return View(lambda whole: whole.unflatten(-1, (num_heads, -1)))


def fused_heads(index: int, num_heads: Sequence[int]) -> View:
    """Return the view ``[..., heads, head_dim]`` of one of several concatenated projections."""
    start, count = sum(num_heads[:index]), num_heads[index]
    total = sum(num_heads)

    def part(whole: torch.Tensor) -> torch.Tensor:
        size = whole.shape[-1] // total
        columns = whole.narrow(-1, start * size, count * size)
        return columns.view(*columns.shape[:-1], count, size)

    return View(part, is_all=False)


def fused_per_head(index: int, num_heads: int, num_kv_heads: int) -> View:
    """Return the view ``[..., heads, head_dim]`` of q, k or v in ``[..., kv_heads, (queries, k, v), size]``.

    ``index`` is 0 for the queries, which are those of the key and the value beside them, 1 for k, 2 for v.
    """
    group = num_heads // num_kv_heads
    start, count = ((0, group), (group, 1), (group + 1, 1))[index]

    def columns(whole: torch.Tensor) -> torch.Tensor:
        grouped: torch.Tensor = whole.unflatten(-1, (num_kv_heads, group + 2, -1))
        return grouped.narrow(-2, start, count)

    # Queries of several groups have the keys and the values between them.
    is_copy = count > 1 and num_kv_heads > 1
    return View(lambda whole: columns(whole).flatten(-3, -2), is_all=False, is_copy=is_copy, columns=columns)


def before_gates(num_heads: int) -> View:
    """Return the view ``[..., heads, head_dim]`` of ``[..., heads * 2 * head_dim]``, without the gates."""
    return View(lambda whole: whole.unflatten(-1, (num_heads, 2, -1))[..., 0, :], is_all=False)


def half(index: int) -> View:
    """Return the view of the first (0) or the second (1) half."""

    def part(whole: torch.Tensor) -> torch.Tensor:
        size = whole.shape[-1] // 2
        return whole.narrow(-1, index * size, size)

    return View(part, is_all=False)
