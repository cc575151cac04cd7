"""Batched reads: one kernel copies the rows of many requests at one site.

Saved values must be copies, since fused norms later change the same memory. Kernels write
into buffers allocated for the step, one buffer for all sites that a group reads alike, so
that a request's values leave as one slice.

Invariant: a reading kernel never holds a reference to the model's memory. It has a ``SiteValue``, which
returns copies and fills the caller's memory, so that no kernel can change the values it reads.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import final

import torch

from nnsight_engine.plans.step.writes import value_at


class SiteValue:
    """The model's value at a site, for kernels that read it.

    Args:
        hidden: ``[rows, …]``; at attention, the layer's queries; of states, those of all requests that vLLM
            holds, ``[slots, width]``.
        residual: The second part of the residual stream, or None; at attention, the layer's keys; of states,
            the slot of each request of the step.
    """

    __slots__ = ("_hidden", "_residual")

    def __init__(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Store both tensors, which no method returns."""
        self._hidden = hidden
        self._residual = residual

    @property
    def shape(self) -> torch.Size:
        """Shape of ``hidden``."""
        return self._hidden.shape

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows' values, ``[rows, width]``, summed in float32."""
        return value_at(rows, self._hidden, self._residual, torch.float32)

    def sums_into(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        span: tuple[int, int] | None,
        overflows: torch.Tensor | None,
    ) -> None:
        """Fill ``out``, ``[rows, width]``, with the rows' values.

        They are summed in float32, or in the model's dtype if ``out`` has it. ``span`` is
        ``(start, stop)`` if the rows are contiguous, so that no index is needed. ``overflows``,
        ``[rows]``, is set to whether a finite number exceeds the dtype of ``out``.
        """
        own = self._part(self._hidden, rows, span)
        if overflows is not None:
            wide = own.to(torch.float32)
            if self._residual is not None:
                wide = wide + self._part(self._residual, rows, span)
            out.copy_(wide)
            torch.any(out.isinf() & wide.isfinite(), dim=-1, out=overflows)
            return
        if self._residual is None:
            out.copy_(own)
            return
        other = self._part(self._residual, rows, span)
        # Nothing here works in place: `to` returns the model's own memory if the dtype is the same.
        if out.dtype in {own.dtype, torch.float32}:
            torch.add(own.to(out.dtype), other, out=out)
        else:
            out.copy_(own.to(torch.float32) + other)

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows' queries, ``[rows, heads, head_dim]``, in float32."""
        return self._hidden.index_select(0, rows).to(torch.float32)

    def keys(self, start: int, stop: int) -> torch.Tensor | None:
        """Return a copy of the rows' keys, ``[rows, kv_heads, head_dim]``; None if the layer has none."""
        return None if self._residual is None else self._residual[start:stop].clone()

    def states_into(self, out: torch.Tensor, requests: torch.Tensor, overflows: torch.Tensor | None) -> None:
        """Fill ``out``, ``[rows, width]``, with the states of requests; ``overflows`` as above."""
        if self._residual is None:
            raise RuntimeError("states are read without the requests' slots")
        slots = self._residual.index_select(0, requests)
        SiteValue(self._hidden, None).sums_into(out, slots, None, overflows)

    @staticmethod
    def _part(tensor: torch.Tensor, rows: torch.Tensor, span: tuple[int, int] | None) -> torch.Tensor:
        return tensor.index_select(0, rows) if span is None else tensor[span[0] : span[1]]


class ReadKernel(abc.ABC):
    """A kernel that does not change the model's values."""

    __slots__ = ()

    @final
    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Read the value, see ``Kernel``."""
        self.read(SiteValue(hidden, residual))

    @abc.abstractmethod
    def read(self, value: SiteValue) -> None:
        """Read the value of the kernel's rows."""


@dataclasses.dataclass(slots=True)
class GatherKernel(ReadKernel):
    """``out = x[rows]``; ``out`` is ``[rows, width]`` of the group's buffer, in the capture's dtype.

    ``span`` is ``(start, stop)`` if the rows are contiguous, else None. ``overflows``, ``[rows]``,
    receives which rows have a number beyond that dtype; None if no row can.
    """

    rows: torch.Tensor
    span: tuple[int, int] | None
    out: torch.Tensor
    overflows: torch.Tensor | None = None

    def read(self, value: SiteValue) -> None:
        """Copy the values into ``out``."""
        value.sums_into(self.out, self.rows, self.span, self.overflows)


@dataclasses.dataclass(slots=True)
class GatherStates(ReadKernel):
    """Copies states of requests, which are given by index in the step; the others as in ``GatherKernel``."""

    requests: torch.Tensor
    out: torch.Tensor
    overflows: torch.Tensor | None = None

    def read(self, value: SiteValue) -> None:
        """Copy the states into ``out``."""
        value.states_into(self.out, self.requests, self.overflows)


@dataclasses.dataclass(slots=True)
class ProbeKernel(ReadKernel):
    """``out = x[rows]·weights + bias`` in float32; ``weights`` ``[rows, width]``, the others ``[rows]``."""

    rows: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor
    out: torch.Tensor

    def read(self, value: SiteValue) -> None:
        """Compute one number per row."""
        torch.add((value.sums(self.rows) * self.weights).sum(dim=-1), self.bias, out=self.out)
