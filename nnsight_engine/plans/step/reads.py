"""Kernels that read: of recurrent states here, of scores and attention patterns elsewhere.

A reading kernel never holds a reference to the model's memory. It has a ``SiteValue``, which returns copies
or fills the caller's memory, so that no kernel can change the values it reads.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import final

import torch


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
        value = self._hidden.index_select(0, rows).to(torch.float32)
        return value if self._residual is None else value + self._residual.index_select(0, rows)

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows' queries, ``[rows, heads, head_dim]``, in float32."""
        return self._hidden.index_select(0, rows).to(torch.float32)

    def keys(self, start: int, stop: int) -> torch.Tensor | None:
        """Return a copy of the rows' keys, ``[rows, kv_heads, head_dim]``; None if the layer has none."""
        return None if self._residual is None else self._residual[start:stop].clone()

    def states_into(self, out: torch.Tensor, requests: torch.Tensor, overflows: torch.Tensor | None) -> None:
        """Fill ``out``, ``[rows, width]``, with the states of requests.

        ``overflows``, ``[rows]``, is set to whether a finite number exceeds the dtype of ``out``.
        """
        if self._residual is None:
            raise RuntimeError("states are read without the requests' slots")
        own = self._hidden.index_select(0, self._residual.index_select(0, requests))
        out.copy_(own)
        if overflows is not None:
            torch.any(out.isinf() & own.isfinite(), dim=-1, out=overflows)


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
class GatherStates(ReadKernel):
    """Copies states of requests, which are given by index in the step.

    Attributes:
        requests: The requests, ``[rows]``.
        out: ``[rows, width]`` of the group's buffer, in the capture's dtype.
        overflows: ``[rows]``, receives which rows have a number beyond that dtype; None if no row can.
    """

    requests: torch.Tensor
    out: torch.Tensor
    overflows: torch.Tensor | None = None

    def read(self, value: SiteValue) -> None:
        """Copy the states into ``out``."""
        value.states_into(self.out, self.requests, self.overflows)
