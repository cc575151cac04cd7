"""Names of the points within a layer, the same everywhere; ``docs/points.md`` has meanings and shapes."""

from __future__ import annotations

from typing import Final

RESIDUAL_LEAVES: Final = ("input", "output")
"""Leaves that are the residual stream itself; taps serve them."""

QUERIES, KEYS, VALUES = "attn.q", "attn.k", "attn.v"
LATENT: Final = "attn.latent"
"""Compressed keys and values, of attention that has no others."""
PATTERN: Final = "attn.pattern"
"""Attention's probabilities, the only leaf whose values grow with the position."""
HEADS: Final = "attn.heads"
MIXER: Final = "mixer.output"
"""The output of a recurrent or convolutional mixer."""
STATE: Final = "mixer.state"
"""A recurrent mixer's state, the only leaf with a value after each step instead of one for each position."""
NEURONS: Final = "mlp.act"
ROUTER: Final = "moe.router"
"""The logits by which experts are chosen."""
EXPERTS: Final = "moe.experts"
"""The ids of the chosen experts, the only leaf whose values are integers."""
EXPERT_WEIGHTS: Final = "moe.weights"
"""The weights of the chosen experts."""
ROUTED, SHARED = "moe.output", "moe.shared.output"
"""Output of the chosen experts, and of those that are used for every token."""

ORDER: Final = (
    "input",
    QUERIES,
    KEYS,
    VALUES,
    LATENT,
    PATTERN,
    HEADS,
    "attn.output",
    MIXER,
    STATE,
    "mlp.input",
    ROUTER,
    EXPERTS,
    EXPERT_WEIGHTS,
    ROUTED,
    SHARED,
    "mlp.gate",
    "mlp.up",
    NEURONS,
    "mlp.output",
    "output",
)
"""The leaves in the order in which a model computes them, on almost every architecture."""


def ordered(*moves: tuple[str, str]) -> tuple[str, ...]:
    """Return ``ORDER`` with leaves moved, each to before another: ``(leaf, other)``."""
    order = list(ORDER)
    for leaf, other in moves:
        order.remove(leaf)
        order.insert(order.index(other), leaf)
    return tuple(order)
