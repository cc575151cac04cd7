"""Batched writes: one kernel changes the rows of many requests at one site.

A site's value is ``hidden + residual`` if the engine keeps the residual stream in two
tensors, else ``hidden`` alone. Each kernel computes everything first and changes memory
in its last statements, so that a kernel that raises has changed nothing and its members can
be run one by one. Row indices of one kernel never repeat.
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


def value_at(
    rows: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the rows' values ``[rows, width]``, summed in ``dtype``; never a view of the model's memory."""
    value = hidden.index_select(0, rows).to(dtype)
    return value if residual is None else value + residual.index_select(0, rows)


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 values in the model's dtype.

    Raises:
        InterventionError: ``not_finite``: a value is beyond float16. The other dtypes have the range of
            float32 and are not checked, since the check synchronizes with the GPU.
    """
    narrow = values.to(dtype)
    if dtype is torch.float16 and bool((narrow.isinf() & values.isfinite()).any()):
        raise InterventionError(
            "not_finite",
            "what the operation adds is beyond float16, in which the model computes; use a smaller scale, "
            "or serve the model in bfloat16 or float32",
        )
    return narrow


@dataclasses.dataclass(slots=True)
class Add:
    """``x += delta``; ``delta`` is ``[rows, width]`` in the model's dtype.

    Adding to ``hidden`` alone is enough: the model sums the two tensors itself. ``span`` is
    ``(start, stop)`` if the rows are contiguous, which costs less than an index.
    """

    rows: torch.Tensor
    span: tuple[int, int] | None
    delta: torch.Tensor

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add in place."""
        del residual
        if self.span is None:
            hidden.index_add_(0, self.rows, self.delta)
        else:
            hidden[self.span[0] : self.span[1]].add_(self.delta)


@dataclasses.dataclass(slots=True)
class NormMatch:
    """``x += ||x|| * direction``; ``direction`` is ``[rows, width]`` float32, scale times the unit vector.

    The scale is a multiple of the residual stream's own norm, so that one number suits every layer.
    """

    rows: torch.Tensor
    direction: torch.Tensor

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add to ``hidden`` in place."""
        norm = value_at(self.rows, hidden, residual, torch.float32).norm(dim=-1, keepdim=True)
        hidden.index_add_(0, self.rows, narrowed(norm * self.direction, hidden.dtype))


@dataclasses.dataclass(slots=True)
class Project:
    """The component ``c = x·unit`` becomes ``c - removed * c + offset``, then at least low and at most high.

    ``unit`` is ``[rows, width]`` float32 of norm one, the others are ``[rows, 1]`` float32. ``bounds`` are
    low and high, infinite for rows without a bound, and None if no row has one.
    """

    rows: torch.Tensor
    unit: torch.Tensor
    offset: torch.Tensor
    removed: torch.Tensor
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add to ``hidden`` in place."""
        value = value_at(self.rows, hidden, residual, torch.float32)
        along = (value * self.unit).sum(dim=-1, keepdim=True)
        change = self.offset - self.removed * along
        if self.bounds is not None:
            low, high = self.bounds
            change = torch.clamp(change, low - along, high - along)
        hidden.index_add_(0, self.rows, narrowed(change * self.unit, hidden.dtype))


@dataclasses.dataclass(slots=True)
class Subspace:
    """``x -= removed * (part of x in a subspace)``, with an orthonormal basis of the subspace in float32.

    Attributes:
        rows: All rows.
        removed: ``[rows, 1]`` float32.
        bases: For the rows in order, the number of rows and either their common basis ``[k, width]`` or the
            basis of each, ``[number, k, width]``. Rows of zeros in a basis have no effect.
    """

    rows: torch.Tensor
    removed: torch.Tensor
    bases: list[tuple[int, torch.Tensor]]

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add to ``hidden`` in place."""
        value = value_at(self.rows, hidden, residual, torch.float32)
        parts = value.split([num_rows for num_rows, _ in self.bases])
        inside = [_inside(part, basis) for part, (_, basis) in zip(parts, self.bases, strict=True)]
        change = -self.removed * torch.cat(inside)
        hidden.index_add_(0, self.rows, narrowed(change, hidden.dtype))


def _inside(rows: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return the part of ``rows``, ``[rows, width]``, in the span of a basis, see ``Subspace.bases``."""
    if basis.ndim == len(("k", "width")):
        return rows @ basis.T @ basis
    along = torch.bmm(basis, rows.unsqueeze(2))
    return torch.bmm(basis.transpose(1, 2), along).squeeze(2)


def store(
    rows: torch.Tensor,
    values: torch.Tensor,
    units: torch.Tensor | None,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    """Set the rows' values to exactly ``values`` ``[rows, width]``, or only their ``units``."""
    if units is None:
        hidden.index_copy_(0, rows, values.to(hidden.dtype))
        if residual is not None:
            residual.index_fill_(0, rows, 0)
        return
    index = (rows.unsqueeze(1), units.unsqueeze(0))
    hidden[index] = values.index_select(1, units).to(hidden.dtype)
    if residual is not None:
        residual[index] = 0


@dataclasses.dataclass(slots=True)
class Set:
    """``x = values`` on all units or the selected ones; ``values`` is ``[rows, width]``."""

    rows: torch.Tensor
    values: torch.Tensor
    units: torch.Tensor | None

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Overwrite in place."""
        store(self.rows, self.values, self.units, hidden, residual)


@dataclasses.dataclass(slots=True)
class Masked:
    """Another kernel, on its rows where ``mask``, ``[rows]``, is True; the others keep their bits."""

    kernel: Kernel
    rows: torch.Tensor
    mask: torch.Tensor

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Run the kernel, and restore the other rows."""
        tensors = [hidden] if residual is None else [hidden, residual]
        before = [tensor.index_select(0, self.rows) for tensor in tensors]
        self.kernel.run(hidden, residual)
        for tensor, old in zip(tensors, before, strict=True):
            mask = self.mask.view(-1, *[1] * (tensor.ndim - 1))
            tensor.index_copy_(0, self.rows, torch.where(mask, tensor.index_select(0, self.rows), old))


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
                    "mean ablation needs the whole prompt in one step, and the scheduler split it "
                    "because other requests filled the step; send the request again, or raise "
                    "--max-num-batched-tokens",
                )
            mean = value_at(self.source_rows, hidden, residual, torch.float32).mean(dim=0)
            self.means[self.key] = mean
        store(self.rows, mean.expand(len(self.rows), -1), self.units, hidden, residual)
