"""Kernels that read: of recurrent states and attention patterns here, of scores and features elsewhere.

They have a ``SiteValue``, which returns copies or fills the caller's memory, and never a reference to the
model's memory, so that no kernel can change the values it reads.

Fused attention kernels never materialize probabilities, so these are recomputed for the rows that are
captured. The layer's queries and keys are read on their way into attention; the softmax is computed
separately, in float32, with the layer's own scale, soft cap and window.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Final, final

import torch

from nnsight_engine.core.errors import InterventionError


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
        slots = self._residual.index_select(0, requests)
        states = self._hidden.index_select(0, slots)
        out.copy_(states)
        if overflows is not None:
            torch.any(out.isinf() & states.isfinite(), dim=-1, out=overflows)


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


SCRATCH_BYTES: Final = 8 * 1024 * 1024
"""Limit on the size of each temporary tensor (widened keys or scores) while patterns are computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionForm:
    """Parameters with which one layer turns queries and keys into probabilities.

    Scores become ``soft_cap * tanh(score / soft_cap)``, 0 for none; a query sees the ``window`` last
    positions, its own included, 0 for all. ``slopes``: what a score loses per position of distance, by head
    (ALiBi).
    """

    scale: float
    soft_cap: float = 0.0
    window: int = 0
    slopes: torch.Tensor | None = None


FormOf = Callable[[int], AttentionForm]
"""Returns a layer's form of attention; raises InterventionError if patterns cannot be computed."""


class AttentionKeyStore:
    """A request's keys at one layer, by absolute position from 0, ``[capacity, kv_heads, head_dim]``.

    vLLM keeps keys in blocks, in layouts that differ between attention backends, and frees those that a
    sliding window has passed. Positions recomputed after a preemption overwrite.
    """

    def __init__(self, keys: torch.Tensor) -> None:
        self._keys = keys
        self.num_keys = 0

    @property
    def capacity(self) -> int:
        return len(self._keys)

    def move_to(self, keys: torch.Tensor) -> None:
        keys[: self.num_keys] = self._keys[: self.num_keys]
        self._keys = keys

    def store(self, start: int, rows: torch.Tensor) -> None:
        """Store ``rows``, ``[positions, kv_heads, head_dim]``, from ``start`` on; raise at a gap before."""
        if start > self.num_keys:
            # A gap would be attended to as if it held keys.
            raise InterventionError(
                "intervention_failed",
                f"attention patterns need every key from position 0 on, and those from {self.num_keys} to "
                f"{start - 1} were not computed for this request; send it again",
            )
        stop = start + len(rows)
        self._keys[start:stop] = rows
        self.num_keys = max(self.num_keys, stop)

    def first_keys(self, num_keys: int) -> torch.Tensor:
        return self._keys[:num_keys]


@dataclasses.dataclass(slots=True)
class PatternState:
    """A live request's key stores by layer; by operation: rows captured so far and keys of the longest."""

    stores: dict[int, AttentionKeyStore] = dataclasses.field(default_factory=dict)
    shapes: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class StoreKeys(ReadKernel):
    """Stores the keys of a request's rows ``first_row`` to ``stop_row``, from position ``start`` on."""

    store: AttentionKeyStore
    start: int
    first_row: int
    stop_row: int

    def read(self, value: SiteValue) -> None:
        keys = value.keys(self.first_row, self.stop_row)
        if keys is None:
            raise InterventionError("unsupported_at_point", "the layer shares another layer's keys")
        self.store.store(self.start, keys)


@dataclasses.dataclass(slots=True)
class ComputePattern(ReadKernel):
    """Computes patterns of rows at ascending positions into ``out``, ``[rows, heads, keys]``, zero at first.

    ``position_numbers`` are Python integers, so that the device need not be synchronized.
    """

    store: AttentionKeyStore
    form: AttentionForm
    rows: torch.Tensor
    positions: torch.Tensor
    position_numbers: list[int]
    out: torch.Tensor
    scratch_bytes: int = SCRATCH_BYTES

    def read(self, value: SiteValue) -> None:
        """Compute a few key heads, and the query heads that share them, at a time."""
        num_heads, head_dim = value.shape[1:]
        keys = self.store.first_keys(self.position_numbers[-1] + 1)
        num_keys, num_kv_heads = keys.shape[:2]
        queries_per_key = num_heads // num_kv_heads
        step = max(1, self.scratch_bytes // (num_keys * head_dim * torch.float32.itemsize))
        for first in range(0, num_kv_heads, step):
            head_keys = keys[:, first : first + step].to(torch.float32)
            heads = slice(first * queries_per_key, (first + head_keys.shape[1]) * queries_per_key)
            self._fill(value, heads, head_keys)

    def _fill(self, value: SiteValue, heads: slice, keys: torch.Tensor) -> None:
        """Compute the patterns of some query ``heads``, a few rows at a time; ``keys`` are those heads'."""
        num_keys, num_kv_heads, head_dim = keys.shape
        out = self.out[:, heads]
        step = max(1, self.scratch_bytes // (num_keys * out.shape[1] * torch.float32.itemsize))
        for start in range(0, len(self.rows), step):
            stop = min(start + step, len(self.rows))
            seen = self.position_numbers[stop - 1] + 1
            queries = value.queries(self.rows[start:stop])[:, heads]
            # Neighbouring heads share a key head: [rows, key heads, queries of each, head_dim].
            queries = queries.view(stop - start, num_kv_heads, -1, head_dim)
            scores = torch.einsum("rhgd,khd->rhgk", queries, keys[:seen]).flatten(1, 2)
            slopes = None if self.form.slopes is None else self.form.slopes[heads]
            out[start:stop, :, :seen] = self._probabilities(scores, self.positions[start:stop], slopes)

    def _probabilities(
        self, scores: torch.Tensor, positions: torch.Tensor, slopes: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the probabilities of ``scores``, ``[rows, heads, keys]``, products of queries and keys."""
        scores = scores.mul_(self.form.scale)
        if self.form.soft_cap:
            scores = scores.div_(self.form.soft_cap).tanh_().mul_(self.form.soft_cap)
        distance = positions[:, None] - torch.arange(scores.shape[-1], device=scores.device)
        if slopes is not None:
            scores -= slopes[:, None] * distance[:, None]
        unseen = distance < 0
        if self.form.window:
            unseen |= distance >= self.form.window
        return scores.masked_fill_(unseen[:, None], float("-inf")).softmax(dim=-1)
