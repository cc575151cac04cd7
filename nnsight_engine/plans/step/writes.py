"""Kernels: work at one site that is no instruction, see ``instructions``.

A site's value is ``hidden + residual`` if the engine keeps the residual stream in two tensors, else
``hidden`` alone. Each kernel computes everything first and changes memory in its last statements, so that a
kernel that raises has changed nothing. Row indices of one kernel never repeat.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from nnsight_engine.core.errors import InterventionError


class Kernel(Protocol):
    """An operation that runs at one site in one step for one or more requests."""

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Read or change the value of the kernel's rows; both tensors are ``[tokens, width]``."""


def value_at(rows: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return the rows' values ``[rows, width]``, summed in float32; never a view of the model's memory."""
    value = hidden.index_select(0, rows).to(torch.float32)
    return value if residual is None else value + residual.index_select(0, rows)


def add_narrowed(
    hidden: torch.Tensor, rows: torch.Tensor, change: torch.Tensor, overflows: torch.Tensor | None
) -> None:
    """Add ``change``, ``[rows, width]`` float32, to the rows of ``hidden`` in the model's dtype.

    Rows whose change is beyond that dtype stay as they are, and are marked in ``overflows``, see
    ``Overflows``; None if no change can be.
    """
    narrow = change.to(hidden.dtype)
    if overflows is not None:
        beyond = (narrow.isinf() & change.isfinite()).any(dim=-1)
        narrow = narrow.masked_fill(beyond.unsqueeze(1), 0)
        overflows.index_copy_(0, rows, overflows.index_select(0, rows) | beyond)
    hidden.index_add_(0, rows, narrow)


@dataclasses.dataclass(slots=True)
class Masked:
    """Another kernel, on some of its rows; the others keep their bits.

    Attributes:
        kernel: The kernel.
        rows: Its rows.
        mask: Whether rows are written, when it runs.
        places: Place of each row in the mask, ``[rows]``.
        overflows: The kernel's own, if it has some.
    """

    kernel: Kernel
    rows: torch.Tensor
    mask: torch.Tensor
    places: torch.Tensor
    overflows: torch.Tensor | None = None

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Run the kernel, and restore the other rows."""
        mask = self.mask.index_select(0, self.places)
        tensors = [tensor for tensor in (hidden, residual, self.overflows) if tensor is not None]
        before = [tensor.index_select(0, self.rows) for tensor in tensors]
        self.kernel.run(hidden, residual)
        for tensor, old in zip(tensors, before, strict=True):
            own = mask.view(-1, *[1] * (tensor.ndim - 1))
            tensor.index_copy_(0, self.rows, torch.where(own, tensor.index_select(0, self.rows), old))


@dataclasses.dataclass(slots=True)
class SetMean:
    """``x = mean of x over the request's matching prompt positions``, for one request at one site.

    The mean exists once one step has computed every matching prompt position; later steps, and
    recomputation after a preemption, use the mean stored in ``means``. ``source_rows`` are the
    matching prompt rows if this step has all of them, else None.
    """

    rows: torch.Tensor
    units: torch.Tensor | None
    source_rows: torch.Tensor | None
    means: dict[tuple[int, int], torch.Tensor]
    key: tuple[int, int]

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Overwrite in place."""
        mean = self.means.get(self.key)
        if mean is None:
            if self.source_rows is None:
                raise InterventionError(
                    "prompt_was_chunked",
                    "mean ablation needs the whole prompt in one step, and this engine splits it, by "
                    "--long-prefill-token-threshold or for a draft model's rows; raise "
                    "--max-num-batched-tokens",
                )
            mean = value_at(self.source_rows, hidden, residual).mean(dim=0)
            self.means[self.key] = mean
        if self.units is None:
            hidden.index_copy_(0, self.rows, mean.to(hidden.dtype).expand(len(self.rows), -1))
            if residual is not None:
                residual.index_fill_(0, self.rows, 0)
            return
        index = (self.rows.unsqueeze(1), self.units.unsqueeze(0))
        hidden[index] = mean.index_select(0, self.units).to(hidden.dtype)
        if residual is not None:
            residual[index] = 0
