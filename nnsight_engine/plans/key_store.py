"""Keys of one request, kept in the worker while it captures attention patterns.

vLLM keeps keys in blocks, in layouts that differ between attention backends, and frees what a
sliding window has passed. A pattern needs each key as the layer saw it, so the keys of a request
are kept apart, by absolute position: a chunked prompt appends, and what is computed again after
a preemption overwrites. They go when the request ends or has captured its last pattern.
"""

from __future__ import annotations

import dataclasses

import torch

from nnsight_engine.core.errors import InterventionError


class AttentionKeyStore:
    """Keys at one layer from position 0 on.

    Args:
        keys: Memory for them, ``[capacity, kv_heads, head_dim]``; the content is overwritten.
    """

    def __init__(self, keys: torch.Tensor) -> None:
        """Start without keys."""
        self._keys = keys
        self.num_keys = 0

    @property
    def capacity(self) -> int:
        """Positions that there is memory for."""
        return len(self._keys)

    def move_to(self, keys: torch.Tensor) -> None:
        """Go on in larger memory; the old is let go."""
        keys[: self.num_keys] = self._keys[: self.num_keys]
        self._keys = keys

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Keep ``rows``, ``[positions, kv_heads, head_dim]``, as those of ``start`` and following."""
        if start > self.num_keys:
            # A hole would be attended to as if it held keys.
            raise InterventionError(
                "intervention_failed",
                f"attention patterns need every key from position 0 on, and those from {self.num_keys} to "
                f"{start - 1} were not computed for this request; send it again",
            )
        stop = start + len(rows)
        self._keys[start:stop] = rows
        self.num_keys = max(self.num_keys, stop)

    def first(self, num_keys: int) -> torch.Tensor:
        """Return the keys of the first positions, ``[num_keys, kv_heads, head_dim]``, not a copy."""
        return self._keys[:num_keys]


@dataclasses.dataclass(slots=True)
class PatternState:
    """What a live request holds for its pattern captures.

    Attributes:
        stores: Keys by layer.
        shapes: By index of the operation: rows captured so far and keys of the longest.
    """

    stores: dict[int, AttentionKeyStore] = dataclasses.field(default_factory=dict)
    shapes: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
