"""Attention keys of one request, stored in the worker while it captures attention patterns.

vLLM keeps keys in blocks, in layouts that differ between attention backends, and frees those that a
sliding window has passed. A pattern needs each key as the layer saw it, so the keys of a request
are stored separately, by absolute position: the chunks of a prompt append, and positions recomputed
after a preemption overwrite. They are freed when the request ends or has captured its last pattern.
"""

from __future__ import annotations

import dataclasses

import torch

from nnsight_engine.core.errors import InterventionError


class AttentionKeyStore:
    """Keys at one layer from position 0 on.

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
