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
    ``overflows`` as in ``add_narrowed``.
    """

    rows: torch.Tensor
    direction: torch.Tensor
    overflows: torch.Tensor | None = None

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add to ``hidden`` in place."""
        norm = value_at(self.rows, hidden, residual, torch.float32).norm(dim=-1, keepdim=True)
        add_narrowed(hidden, self.rows, norm * self.direction, self.overflows)


@dataclasses.dataclass(slots=True)
class Project:
    """The component ``c = x·unit`` becomes ``c - removed * c + offset``, then at least low and at most high.

    ``unit`` is ``[rows, width]`` float32 of norm one, the others are ``[rows, 1]`` float32. ``bounds`` are
    low and high, infinite for rows without a bound, and None if no row has one. ``overflows`` as in
    ``add_narrowed``.
    """

    rows: torch.Tensor
    unit: torch.Tensor
    offset: torch.Tensor
    removed: torch.Tensor
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None
    overflows: torch.Tensor | None = None

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add to ``hidden`` in place."""
        value = value_at(self.rows, hidden, residual, torch.float32)
        along = (value * self.unit).sum(dim=-1, keepdim=True)
        change = self.offset - self.removed * along
        if self.bounds is not None:
            low, high = self.bounds
            change = torch.clamp(change, low - along, high - along)
        add_narrowed(hidden, self.rows, change * self.unit, self.overflows)


@dataclasses.dataclass(slots=True)
class Subspace:
    """``x -= removed * (part of x in a subspace)``, with an orthonormal basis of the subspace in float32.

    Attributes:
        rows: All rows.
        removed: ``[rows, 1]`` float32.
        bases: For the rows in order, the number of rows and either their common basis ``[k, width]`` or the
            basis of each, ``[number, k, width]``. Rows of zeros in a basis have no effect.
        overflows: As in ``add_narrowed``.
    """

    rows: torch.Tensor
    removed: torch.Tensor
    bases: list[tuple[int, torch.Tensor]]
    overflows: torch.Tensor | None = None

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add to ``hidden`` in place."""
        value = value_at(self.rows, hidden, residual, torch.float32)
        parts = value.split([num_rows for num_rows, _ in self.bases])
        inside = [_inside(part, basis) for part, (_, basis) in zip(parts, self.bases, strict=True)]
        add_narrowed(hidden, self.rows, -self.removed * torch.cat(inside), self.overflows)


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


def run_masked(
    kernel: Kernel,
    rows: torch.Tensor,
    mask: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    overflows: torch.Tensor | None,
) -> None:
    """Run a kernel on its rows where ``mask``, ``[rows]``, is True; the others keep their bits.

    ``overflows`` are the kernel's own, if it has some.
    """
    tensors = [tensor for tensor in (hidden, residual, overflows) if tensor is not None]
    before = [tensor.index_select(0, rows) for tensor in tensors]
    kernel.run(hidden, residual)
    for tensor, old in zip(tensors, before, strict=True):
        own = mask.view(-1, *[1] * (tensor.ndim - 1))
        tensor.index_copy_(0, rows, torch.where(own, tensor.index_select(0, rows), old))


@dataclasses.dataclass(slots=True)
class Masked:
    """Another kernel, on its rows where ``mask``, ``[rows]``, is True; the others keep their bits."""

    kernel: Kernel
    rows: torch.Tensor
    mask: torch.Tensor
    overflows: torch.Tensor | None = None

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Run the kernel, and restore the other rows."""
        run_masked(self.kernel, self.rows, self.mask, hidden, residual, self.overflows)


@dataclasses.dataclass(slots=True)
class Gated:
    """Another kernel, on its rows whose gate is open when it runs.

    ``gates`` are those of the step, and ``places``, ``[rows]``, the rows' places among them.
    """

    kernel: Kernel
    rows: torch.Tensor
    gates: torch.Tensor
    places: torch.Tensor
    overflows: torch.Tensor | None = None

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Run the kernel, and restore the other rows."""
        gates = self.gates.index_select(0, self.places)
        run_masked(self.kernel, self.rows, gates, hidden, residual, self.overflows)


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
            mean = value_at(self.source_rows, hidden, residual, torch.float32).mean(dim=0)
            self.means[self.key] = mean
        store(self.rows, mean.expand(len(self.rows), -1), self.units, hidden, residual)
