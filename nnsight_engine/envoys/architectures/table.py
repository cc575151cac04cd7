"""Location of each standard point in the module tree of each family of transformers models.

The points are those that the server offers on vLLM, with the same names and meaning; the
modules that carry them have other names there. ``architecture`` resolves a family against one model.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Final, Literal

from nnsight_engine.envoys.architectures.places import Place, renamed

RouterOrder = tuple[int, ...]

Part = Literal["", "q", "k", "v", "gate", "up", "weights", "ids"]

PATTERN: Final = "attn.pattern"
HEADS: Final = "attn.heads"
NEURONS: Final = "mlp.act"
QUERIES, KEYS, VALUES, LATENT = "attn.q", "attn.k", "attn.v", "attn.latent"
ROUTER: Final = "moe.router"
"""The logits by which a block's experts are chosen."""
EXPERTS, EXPERT_WEIGHTS, ROUTED, SHARED = "moe.experts", "moe.weights", "moe.output", "moe.shared.output"
MIXER: Final = "mixer.output"
"""The output of a block's recurrent or convolutional mixer."""

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
"""The leaves of a layer in the order in which a model computes them, on almost every architecture."""


def ordered(*moves: tuple[str, str]) -> tuple[str, ...]:
    """Return ``ORDER`` with leaves moved, each to before another: ``(leaf, other)``."""
    order = list(ORDER)
    for leaf, other in moves:
        order.remove(leaf)
        order.insert(order.index(other), leaf)
    return tuple(order)


@dataclasses.dataclass(frozen=True, slots=True)
class ModulePath(Place):
    """The value of a module that a leaf refers to.

    ``input`` is the first argument, ``output`` the return value, or the first item of a tuple.

    Attributes:
        part: Part of a fused output, or an item of what a router returns; empty for the whole.
        operation: The operation inside the module's ``forward`` whose output it is, as ``source`` names it;
            empty for the module's own.
    """

    part: Part = ""
    operation: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ArchitectureFamily:
    """One layout of decoder blocks.

    Attributes:
        model_types: ``model_type`` of the configs that have this layout.
        bodies: Candidate paths of the decoder, empty for the model itself; the first one with layers is used.
        layers: The list of blocks, below the body.
        norm: The final norm, below the body; the attribute may be None (OPT-350m).
        embed: The module whose output enters the first block, below the body; empty if there is none.
        attention: The attention module, below a block.
        mlp: The MLP, below a block; empty if its modules are children of the block itself.
        leaves: Location of each leaf of a layer, except ``attn.pattern``, which no module provides. A layer
            has those whose modules it has.
        other_leaves: Location of leaves in layers that lack the modules in ``leaves``.
        order: The leaves in the order in which a layer computes them.
        is_qkv_per_head: Whether a fused projection returns ``[heads, (q, k, v), head_dim]`` rather than all
            of
            q, then k, then v.
        has_norms_last: Whether norms follow attention and MLP, so that their input is the residual stream
            itself.
        flattened: Leaves whose values are ``[batch * tokens, width]``, at least in some layers.
        router_order: The index of logits, weights and ids in what a router of experts returns. Without the
            last, it returns weights for all experts, and zero for those that are not chosen.
        has_pattern: Whether attention's probabilities are a point.
    """

    model_types: tuple[str, ...]
    bodies: tuple[str, ...]
    layers: str
    norm: str
    embed: str
    attention: str
    mlp: str
    leaves: Mapping[str, ModulePath]
    other_leaves: Mapping[str, ModulePath] = dataclasses.field(default_factory=dict)
    order: tuple[str, ...] = ORDER
    is_qkv_per_head: bool = False
    has_norms_last: bool = False
    flattened: frozenset[str] = frozenset()
    router_order: RouterOrder = (0, 1, 2)
    has_pattern: bool = True


def stream_leaves() -> dict[str, ModulePath]:
    """Return the residual stream's leaves, which every block has."""
    return {"input": ModulePath("", "input"), "output": ModulePath("", "output")}


def block_leaves(
    *, qkv: str | tuple[str, str, str], out: str, mlp: tuple[str, str], up: str, down: str
) -> dict[str, ModulePath]:
    """Return the leaves of a block.

    Args:
        qkv: The projections of queries, keys and values, or a single fused one.
        out: Attention's output projection.
        mlp: The first and the last module of the MLP.
        up: The MLP's first projection, or the second of a gated MLP.
        down: The MLP's last projection.
    """
    if isinstance(qkv, str):
        q, k, v = (
            ModulePath(qkv, "output", "q"),
            ModulePath(qkv, "output", "k"),
            ModulePath(qkv, "output", "v"),
        )
    else:
        q, k, v = (ModulePath(path, "output") for path in qkv)
    return {
        **stream_leaves(),
        # The attention module returns a tuple, so the output of its projection is used.
        "attn.output": ModulePath(out, "output"),
        QUERIES: q,
        KEYS: k,
        VALUES: v,
        HEADS: ModulePath(out, "input"),
        "mlp.input": ModulePath(mlp[0], "input"),
        "mlp.output": ModulePath(mlp[1], "output"),
        "mlp.up": ModulePath(up, "output"),
        NEURONS: ModulePath(down, "input"),
    }


def _frozen(leaves: dict[str, ModulePath]) -> Mapping[str, ModulePath]:
    return types.MappingProxyType(leaves)


def _at(leaves: Mapping[str, ModulePath], paths: Mapping[str, str]) -> Mapping[str, ModulePath]:
    """Return leaves whose modules are at other paths."""
    return _frozen(
        {
            leaf: dataclasses.replace(place, path=paths.get(place.path, place.path))
            for leaf, place in leaves.items()
        }
    )


_SEPARATE_QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

_LLAMA: Final = ArchitectureFamily(
    model_types=(
        *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gemma3"),
        *("cohere", "cohere2", "ernie4_5", "hunyuan_v1_dense", "olmo", "seed_oss", "smollm3", "stablelm"),
    ),
    bodies=("model", "model.language_model", ""),
    layers="layers",
    norm="norm",
    embed="embed_tokens",
    attention="self_attn",
    mlp="mlp",
    leaves=_frozen(
        block_leaves(
            qkv=_SEPARATE_QKV,
            out="self_attn.o_proj",
            mlp=("mlp", "mlp"),
            up="mlp.up_proj",
            down="mlp.down_proj",
        )
        | {"mlp.gate": ModulePath("mlp.gate_proj", "output")}
    ),
)

_PHI3: Final = dataclasses.replace(
    _LLAMA,
    model_types=("phi3",),
    leaves=_frozen(
        block_leaves(
            qkv="self_attn.qkv_proj",
            out="self_attn.o_proj",
            mlp=("mlp", "mlp"),
            up="mlp.gate_up_proj",
            down="mlp.down_proj",
        )
        | {
            "mlp.gate": ModulePath("mlp.gate_up_proj", "output", "gate"),
            "mlp.up": ModulePath("mlp.gate_up_proj", "output", "up"),
        }
    ),
)

_GLM: Final = dataclasses.replace(
    _PHI3,
    model_types=("glm", "glm4"),
    leaves=_frozen({**_PHI3.leaves, **{leaf: _LLAMA.leaves[leaf] for leaf in (QUERIES, KEYS, VALUES)}}),
)

_OLMO2: Final = dataclasses.replace(_LLAMA, model_types=("exaone4", "olmo2", "olmo3"), has_norms_last=True)

_GRANITE: Final = dataclasses.replace(_LLAMA, model_types=("granite",), embed="")  # it scales embeddings

# Experts have no neurons in common, so that no module has them; blocks without experts have their own.
_EXPERTS: Final = dataclasses.replace(
    _LLAMA,
    model_types=("ernie4_5_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    leaves=_frozen(
        {
            **_LLAMA.leaves,
            ROUTER: ModulePath("mlp.gate", "output", operation="F_linear_0"),
            EXPERTS: ModulePath("mlp.gate", "output", "ids"),
            EXPERT_WEIGHTS: ModulePath("mlp.gate", "output", "weights"),
            ROUTED: ModulePath("mlp.experts", "output"),
        }
    ),
    flattened=frozenset({ROUTER, EXPERTS, EXPERT_WEIGHTS, ROUTED}),
)

_SHARED_EXPERTS: Final = dataclasses.replace(
    _EXPERTS,
    model_types=("glm4_moe",),
    leaves=_frozen({**_EXPERTS.leaves, SHARED: ModulePath("mlp.shared_experts", "output")}),
)

# Attention that compresses keys and values.
_MLA: Final = dataclasses.replace(
    _SHARED_EXPERTS,
    model_types=("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    leaves=_frozen(
        {
            **{
                leaf: place
                for leaf, place in _SHARED_EXPERTS.leaves.items()
                if leaf not in {QUERIES, KEYS, VALUES}
            },
            LATENT: ModulePath("self_attn.kv_a_layernorm", "output"),
        }
    ),
    has_pattern=False,
)

_GPT_OSS: Final = dataclasses.replace(
    _EXPERTS,
    model_types=("gpt_oss",),
    leaves=_at(_EXPERTS.leaves, {"mlp.gate": "mlp.router"}),
    has_pattern=False,  # attention has sinks beside the positions
)

_GRANITE_MOE: Final = dataclasses.replace(
    _EXPERTS,
    model_types=("granitemoe",),
    embed="",  # it scales embeddings
    mlp="block_sparse_moe",
    leaves=_frozen(renamed(_at(_EXPERTS.leaves, {"mlp.gate": "mlp.router"}), {"mlp": "block_sparse_moe"})),
    router_order=(2, 1, 0),
)

# The sum of routed and shared experts is no module's.
_GRANITE_MOE_SHARED: Final = dataclasses.replace(
    _GRANITE_MOE,
    model_types=("granitemoeshared",),
    mlp="",
    leaves=_frozen(
        {
            **{leaf: place for leaf, place in _GRANITE_MOE.leaves.items() if leaf != "mlp.output"},
            "mlp.input": ModulePath("post_attention_layernorm", "output"),
            SHARED: ModulePath("shared_mlp", "output"),
        }
    ),
)

_LLAMA4: Final = dataclasses.replace(
    _EXPERTS,
    model_types=("llama4_text",),
    mlp="feed_forward",
    leaves=_frozen(
        {
            # vLLM orders the numbers of queries and keys differently, and no module has what experts add.
            **{
                leaf: place
                for leaf, place in renamed(_LLAMA.leaves, {"mlp": "feed_forward"}).items()
                if leaf not in {QUERIES, KEYS}
            },
            ROUTER: ModulePath("feed_forward.router", "output", operation="super_forward_0"),
            EXPERTS: ModulePath("feed_forward.router", "output", "ids"),
            EXPERT_WEIGHTS: ModulePath("feed_forward.router", "output", "weights"),
        }
    ),
    flattened=_EXPERTS.flattened | {"mlp.output"},
    router_order=(1, 0),
    has_pattern=False,
)

_NEMOTRON: Final = dataclasses.replace(
    _LLAMA,
    model_types=("nemotron",),
    leaves=_frozen({leaf: place for leaf, place in _LLAMA.leaves.items() if leaf != "mlp.gate"}),
)

_PHI: Final = dataclasses.replace(
    _LLAMA,
    model_types=("phi",),
    norm="final_layernorm",
    embed="",  # in training mode, dropout follows the embedding
    leaves=_frozen(
        block_leaves(
            qkv=_SEPARATE_QKV, out="self_attn.dense", mlp=("mlp", "mlp"), up="mlp.fc1", down="mlp.fc2"
        )
    ),
)

_STARCODER2: Final = dataclasses.replace(
    _LLAMA,
    model_types=("starcoder2",),
    embed="",  # likewise
    leaves=_frozen(
        block_leaves(
            qkv=_SEPARATE_QKV, out="self_attn.o_proj", mlp=("mlp", "mlp"), up="mlp.c_fc", down="mlp.c_proj"
        )
    ),
)

_GPT2: Final = ArchitectureFamily(
    model_types=("gpt2",),
    bodies=("transformer", ""),
    layers="h",
    norm="ln_f",
    embed="",
    attention="attn",
    mlp="mlp",
    leaves=_frozen(
        block_leaves(
            qkv="attn.c_attn", out="attn.c_proj", mlp=("mlp", "mlp"), up="mlp.c_fc", down="mlp.c_proj"
        )
    ),
)

_OPT: Final = ArchitectureFamily(
    model_types=("opt",),
    bodies=("model.decoder", "decoder", ""),
    layers="layers",
    norm="final_layer_norm",
    embed="",
    attention="self_attn",
    mlp="",
    leaves=_frozen(
        block_leaves(qkv=_SEPARATE_QKV, out="self_attn.out_proj", mlp=("fc1", "fc2"), up="fc1", down="fc2")
    ),
    flattened=frozenset({"mlp.input", "mlp.up", NEURONS, "mlp.output"}),
)

_GPT_NEOX: Final = ArchitectureFamily(
    model_types=("gpt_neox",),
    bodies=("gpt_neox", ""),
    layers="layers",
    norm="final_layer_norm",
    embed="",  # in training mode, dropout follows the embedding
    attention="attention",
    mlp="mlp",
    leaves=_frozen(
        block_leaves(
            qkv="attention.query_key_value",
            out="attention.dense",
            mlp=("mlp", "mlp"),
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        )
    ),
    is_qkv_per_head=True,
)

_FAMILIES: Final = (
    *(_EXPERTS, _SHARED_EXPERTS, _MLA, _GPT_OSS, _GRANITE_MOE, _GRANITE_MOE_SHARED, _LLAMA4),
    *(_LLAMA, _PHI3, _GLM, _GRANITE, _NEMOTRON, _OLMO2, _PHI, _STARCODER2),
    *(_GPT2, _OPT, _GPT_NEOX),
)

FAMILIES: Final[Mapping[str, ArchitectureFamily]] = types.MappingProxyType(
    {model_type: family for family in _FAMILIES for model_type in family.model_types}
)
"""The layout of each ``model_type``."""
