"""Kernels of attention patterns: attention probabilities, recomputed for the rows that are captured.

Fused attention kernels never materialize the probabilities. In a step that captures them, the layer's
queries and keys are read on their way into attention: keys are stored for as long as the request
captures, and the softmax of the captured rows is computed separately, in float32, with the layer's own
scale, soft cap and window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.step.reads import ReadKernel, SiteValue

SCRATCH_BYTES: Final = 8 * 1024 * 1024
"""Limit on the size of each temporary tensor (widened keys or scores) while patterns are computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionForm:
    """Parameters with which one layer turns queries and keys into probabilities.

    Attributes:
        scale: Factor on the dot products.
        soft_cap: Scores become ``cap * tanh(score / cap)``; 0 for none.
        window: A query sees this many last positions, its own included; 0 for all.
        slopes: For each head, a factor on the distance to a position that its score loses (ALiBi), on the
            model's device; None for none.
    """

    scale: float
    soft_cap: float = 0.0
    window: int = 0
    slopes: torch.Tensor | None = None


FormOf = Callable[[int], AttentionForm]
"""Returns a layer's form of attention; raises InterventionError if patterns cannot be computed."""


class AttentionKeyStore:
    """Keys at one layer from position 0 on, stored while a request captures attention patterns.

    vLLM keeps keys in blocks, in layouts that differ between attention backends, and frees those that a
    sliding window has passed. A pattern needs each key as the layer saw it. So a request's keys are stored
    separately, by absolute position: the chunks of a prompt append, and positions recomputed after a
    preemption overwrite. They are freed when the request ends or has captured its last pattern.

    Args:
        keys: Memory for them, ``[capacity, kv_heads, head_dim]``; the content is overwritten.

    Attributes:
        num_keys: Number of keys stored.
    """

    def __init__(self, keys: torch.Tensor) -> None:
        self._keys = keys
        self.num_keys = 0

    @property
    def capacity(self) -> int:
        """Number of positions that the memory holds."""
        return len(self._keys)

    def move_to(self, keys: torch.Tensor) -> None:
        """Copy the stored keys to larger memory and release the old memory."""
        keys[: self.num_keys] = self._keys[: self.num_keys]
        self._keys = keys

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Store ``rows``, ``[positions, kv_heads, head_dim]``, as the keys of ``start`` and the following.

        Raises:
            InterventionError: ``intervention_failed``: there would be a gap before ``start``.
        """
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

    def first(self, num_keys: int) -> torch.Tensor:
        """Return a view of the keys of the first positions, ``[num_keys, kv_heads, head_dim]``."""
        return self._keys[:num_keys]


@dataclasses.dataclass(slots=True)
class PatternState:
    """State of a live request's pattern captures.

    Attributes:
        stores: Keys by layer.
        shapes: By index of the operation: rows captured so far and keys of the longest.
    """

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
        """Copy the keys into the store."""
        keys = value.keys(self.first_row, self.stop_row)
        if keys is None:
            raise InterventionError("unsupported_at_point", "the layer shares another layer's keys")
        self.store.put(self.start, keys)


@dataclasses.dataclass(slots=True)
class ComputePattern(ReadKernel):
    """Computes the patterns of ``rows``, at ascending ``positions``, into ``out``.

    ``out`` is ``[rows, heads, keys]`` and initially zero. ``position_numbers`` are the positions
    as Python integers, so that the device need not be synchronized.
    """

    store: AttentionKeyStore
    form: AttentionForm
    rows: torch.Tensor
    positions: torch.Tensor
    position_numbers: list[int]
    out: torch.Tensor
    scratch_bytes: int = SCRATCH_BYTES

    def read(self, value: SiteValue) -> None:
        """Compute the patterns from the step's queries."""
        num_heads, head_dim = value.shape[1:]
        keys = self.store.first(self.position_numbers[-1] + 1)
        num_keys, num_kv_heads = keys.shape[:2]
        group = num_heads // num_kv_heads
        step = max(1, self.scratch_bytes // (num_keys * head_dim * torch.float32.itemsize))
        for first in range(0, num_kv_heads, step):
            own = keys[:, first : first + step].to(torch.float32)
            heads = slice(first * group, (first + own.shape[1]) * group)
            self._fill(value, heads, own)

    def _fill(self, value: SiteValue, heads: slice, keys: torch.Tensor) -> None:
        num_keys, num_kv_heads, head_dim = keys.shape
        out = self.out[:, heads]
        step = max(1, self.scratch_bytes // (num_keys * out.shape[1] * torch.float32.itemsize))
        for start in range(0, len(self.rows), step):
            stop = min(start + step, len(self.rows))
            seen = self.position_numbers[stop - 1] + 1
            own = value.queries(self.rows[start:stop])[:, heads]
            # Neighbouring heads share a key head: [rows, key heads, queries of each, head_dim].
            own = own.view(stop - start, num_kv_heads, -1, head_dim)
            scores = torch.einsum("rhgd,khd->rhgk", own, keys[:seen]).flatten(1, 2)
            slopes = None if self.form.slopes is None else self.form.slopes[heads]
            out[start:stop, :, :seen] = self._probabilities(scores, self.positions[start:stop], slopes)

    def _probabilities(
        self, scores: torch.Tensor, positions: torch.Tensor, slopes: torch.Tensor | None
    ) -> torch.Tensor:
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
