"""Kernels that read: of recurrent states here, of scores and attention patterns elsewhere.

They have a ``SiteValue``, which returns copies or fills the caller's memory, and never a reference to the
model's memory, so that no kernel can change the values it reads.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import final

import torch


class SiteValue:
    """The model's value at a site, for kernels that read it.

    ``hidden`` is ``[rows, …]``, ``residual`` the second part of the residual stream, or None. At attention,
    they are queries and keys; of states, ``[slots, width]`` of all that vLLM holds, and each request's slot.
    """

    __slots__ = ("_hidden", "_residual")

    def __init__(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        self._hidden = hidden
        self._residual = residual

    @property
    def shape(self) -> torch.Size:
        return self._hidden.shape

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows' values, ``[rows, width]``, summed in float32."""
        value = self._hidden.index_select(0, rows).to(torch.float32)
        return value if self._residual is None else value + self._residual.index_select(0, rows)

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy, ``[rows, heads, head_dim]``, in float32."""
        return self._hidden.index_select(0, rows).to(torch.float32)

    def keys(self, start: int, stop: int) -> torch.Tensor | None:
        """Return a copy, ``[rows, kv_heads, head_dim]``; None if the layer has none."""
        return None if self._residual is None else self._residual[start:stop].clone()

    def states_into(self, out: torch.Tensor, requests: torch.Tensor, overflows: torch.Tensor | None) -> None:
        """Fill ``out``, ``[rows, width]``, and set ``overflows`` where a finite number exceeds its dtype."""
        if self._residual is None:
            raise RuntimeError("states are read without the requests' slots")
        own = self._hidden.index_select(0, self._residual.index_select(0, requests))
        out.copy_(own)
        if overflows is not None:
            torch.any(out.isinf() & own.isfinite(), dim=-1, out=overflows)


class ReadKernel(abc.ABC):
    __slots__ = ()

    @final
    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        self.read(SiteValue(hidden, residual))

    @abc.abstractmethod
    def read(self, value: SiteValue) -> None: ...


@dataclasses.dataclass(slots=True)
class GatherStates(ReadKernel):
    requests: torch.Tensor
    out: torch.Tensor
    overflows: torch.Tensor | None = None

    def read(self, value: SiteValue) -> None:
        value.states_into(self.out, self.requests, self.overflows)
