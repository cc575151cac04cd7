"""Batched reads: one kernel copies the rows of many requests at one site.

What is saved must be a copy, since fused norms later change the same memory. Kernels write
into buffers allocated for the step, one buffer for all sites that a group reads alike, so
that a request's values leave as one slice.
"""

from __future__ import annotations

import dataclasses

import torch

from nnsight_engine.plans.writes import value_at


@dataclasses.dataclass(slots=True)
class Gather:
    """``out = x[rows]``; ``out`` is ``[rows, width]`` of the group's buffer, in the capture's dtype.

    ``span`` is ``(start, stop)`` when the rows are contiguous, so that no index is needed.
    """

    rows: torch.Tensor
    span: tuple[int, int] | None
    out: torch.Tensor

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Copy the values out."""
        if self.span is None:
            own = hidden.index_select(0, self.rows)
            other = None if residual is None else residual.index_select(0, self.rows)
        else:
            own = hidden[self.span[0] : self.span[1]]
            other = None if residual is None else residual[self.span[0] : self.span[1]]
        # Nothing here is done in place: `to` gives back the model's own memory where the dtype is the same.
        if other is None:
            self.out.copy_(own)
        elif self.out.dtype in {own.dtype, torch.float32}:
            torch.add(own.to(self.out.dtype), other, out=self.out)
        else:
            self.out.copy_(own.to(torch.float32) + other)


@dataclasses.dataclass(slots=True)
class Probe:
    """``out = x[rows]·weights + bias`` in float32; ``weights`` ``[rows, width]``, the others ``[rows]``."""

    rows: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor
    out: torch.Tensor

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Compute one number per row."""
        value = value_at(self.rows, hidden, residual, torch.float32)
        torch.add((value * self.weights).sum(dim=-1), self.bias, out=self.out)
