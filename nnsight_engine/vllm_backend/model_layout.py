"""Location of the points in one model: the same in all of its workers, in sandboxes and on clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from nnsight_engine.core.leaves import (
    EXPERT_WEIGHTS,
    EXPERTS,
    HEADS,
    LATENT,
    PATTERN,
    QUERIES,
    ROUTER,
    STATE,
    VALUES,
)
from nnsight_engine.families.engine_family import EngineFamily
from nnsight_engine.families.places import Place


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPoints:
    """Points within one block; sizes are those of the whole model, and 0 or empty without the point.

    Attributes:
        kernel: Path, relative to the block, of vLLM's ``Attention``.
        latent_size: Width of ``attn.latent``.
        inner_size: Width of ``mlp.act``.
        num_chosen: Number of experts that are chosen for each token.
        forces_experts: Whether given experts can be used instead.
        hides_pattern: Attention has sinks beside the positions, or no module of transformers has the pattern.
        state_shape: Heads, head_dim and state_size of ``mixer.state``.
    """

    leaves: Mapping[str, Place]
    kernel: str = ""
    num_heads: int = 0
    latent_size: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    inner_size: int = 0
    num_experts: int = 0
    is_causal: bool = True
    num_chosen: int = 0
    forces_experts: bool = False
    hides_pattern: bool = False
    state_shape: tuple[int, ...] = ()

    @property
    def attention(self) -> str:
        return self.kernel.partition(".")[0]

    @property
    def attention_input(self) -> Place | None:
        for leaf in (VALUES, QUERIES):
            if leaf in self.leaves:
                return Place(self.leaves[leaf].path, "input")
        # Its first projection has several names, or lacks biases; the norm before it has one.
        is_known = LATENT in self.leaves or HEADS in self.leaves
        return Place("input_layernorm", "output") if is_known else None

    @property
    def mlp(self) -> str:
        """Path of the MLP, relative to the block; empty if there is no module of its own."""
        if "mlp.input" not in self.leaves or "mlp.output" not in self.leaves:
            return ""
        first, last = self.leaves["mlp.input"].path, self.leaves["mlp.output"].path
        return first if first == last else ""

    @property
    def has_pattern(self) -> bool:
        """Whether attention's probabilities can be computed from its queries and keys."""
        is_offered = self.is_causal and not self.hides_pattern
        return bool(self.kernel) and "attn.k" in self.leaves and is_offered

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        queries, keys = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        inner = (self.inner_size,)
        of_leaf = {
            "attn.q": queries,
            "attn.heads": queries,
            "attn.k": keys,
            "attn.v": keys,
            "mlp.gate": inner,
            "mlp.up": inner,
            "mlp.act": inner,
            LATENT: (self.latent_size,),
            ROUTER: (self.num_experts,),
            EXPERTS: (self.num_chosen,),
            EXPERT_WEIGHTS: (self.num_chosen,),
            STATE: self.state_shape,
        }
        shapes = {leaf: of_leaf.get(leaf, (hidden_size,)) for leaf in self.leaves}
        return shapes | ({PATTERN: (self.num_heads, -1)} if self.has_pattern else {})


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLayout:
    family: EngineFamily
    blocks: tuple[BlockPoints, ...]

    def to_plain(self) -> dict[str, Any]:
        """Return the layout as JSON values; blocks that are alike are listed once."""
        kinds: list[BlockPoints] = []
        for block in self.blocks:
            if block not in kinds:
                kinds.append(block)
        # The table's leaves are those of the blocks.
        family = dataclasses.replace(self.family, leaves={})
        return {
            "family": msgspec.to_builtins(family),
            "kinds": [msgspec.to_builtins(kind) for kind in kinds],
            "blocks": [kinds.index(block) for block in self.blocks],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ModelLayout:
        kinds = [msgspec.convert(kind, BlockPoints) for kind in plain["kinds"]]
        family = msgspec.convert(plain["family"], EngineFamily)
        return cls(family, tuple(kinds[index] for index in plain["blocks"]))
