"""The description of a loaded model, made once by the worker; admission checks requests against it.

Names of the points within a layer, the same everywhere; ``docs/points.md`` has meanings and shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from api_schemas.points import ENCODER_BLOCK

_LEAST_WORK: Final = 2**24


@dataclasses.dataclass(frozen=True, slots=True)
class LeafSpec:
    """One kind of point: ``attn.q`` of a layer, or a point of the whole model such as ``logits``.

    Attributes:
        shape: Of one position's value; empty for ``samples`` (one token id), ``(heads, -1)`` for
            ``attn.pattern``, whose last axis grows with the position.
        tier: ``tap`` if the compiled step serves it, ``eager`` if the step must run uncompiled with hooks.
        layers: The layers that have it in this shape (the encoder's, for its leaf); None for all, and for a
            point of the whole model.
        num_patches: Rows for each position; several only in a vision encoder, one for each patch.
    """

    name: str
    shape: tuple[int, ...]
    tier: str
    operations: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    num_patches: int = 1

    @property
    def width(self) -> int:
        """Number of elements of one position's value; an axis that grows counts as one."""
        total = 1
        for size in self.shape:
            total *= abs(size)
        return total


def leaf_at(leaves: Sequence[LeafSpec], name: str, layer: int | None = None) -> LeafSpec | None:
    """Return the leaf of a name that is in a layer, or in any if that is None; None if there is none."""
    return next(
        (
            leaf
            for leaf in leaves
            if leaf.name == name and (layer is None or leaf.layers is None or layer in leaf.layers)
        ),
        None,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model as interventions see it; sizes are of the whole model, not of one rank."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    leaves: tuple[LeafSpec, ...]
    max_capture_bytes: int
    max_work: float = 64.0
    num_stages: int = 1
    max_dictionary_bytes: int = 2 * 1024**3
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def forward_work(self) -> int:
        """Estimated multiply-adds of a forward pass for one position, at least ``_LEAST_WORK``."""
        width = self.hidden_size
        return max(_LEAST_WORK, width * (12 * width * self.num_layers + self.vocab_size))

    def leaf(self, name: str, layer: int | None = None) -> LeafSpec | None:
        """Return a leaf of a layer (-1 for the whole model, None for any); None if there is none."""
        return leaf_at(self.leaves, name, layer)

    def layers_of(self, name: str) -> list[int]:
        return [layer for layer in range(self.num_layers_of(name)) if self.leaf(name, layer) is not None]

    def num_layers_of(self, name: str) -> int:
        """Return the number of layers among which a leaf's are counted: those of the model or its encoder."""
        encoder = self.leaf(ENCODER_BLOCK) if name == ENCODER_BLOCK else None
        return self.num_layers if encoder is None or encoder.layers is None else len(encoder.layers)

    def to_plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ModelSpec:
        leaves = tuple(
            LeafSpec(
                name=leaf["name"],
                shape=tuple(leaf["shape"]),
                tier=leaf["tier"],
                operations=tuple(leaf["operations"]),
                layers=None if leaf["layers"] is None else tuple(leaf["layers"]),
                num_patches=leaf["num_patches"],
            )
            for leaf in plain["leaves"]
        )
        return cls(**{**plain, "leaves": leaves})


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
