from __future__ import annotations

import dataclasses

from nnsight_engine.core.leaves import ORDER
from nnsight_engine.families.places import Places

RouterOrder = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TransformersFamily:
    """One layout of decoder blocks in transformers.

    Attributes:
        bodies: Candidate paths of the decoder, empty for the model itself; the first one with layers is used.
        norm: The final norm, below the body; the attribute may be None (OPT-350m).
        embed: The module whose output enters the first block, below the body; empty if there is none.
        mlp: The MLP, below a block; empty if its modules are children of the block itself.
        leaves: Location of each leaf of a layer. ``attn.pattern`` is among them only where a module takes it.
            A layer has those whose modules it has.
        order: The leaves in the order in which a layer computes them.
        is_qkv_per_head: Whether a fused projection returns ``[kv_heads, (queries, k, v), head_dim]`` rather
            than all of q, then k, then v.
        has_query_gates: Whether the projection of queries returns a gate after each head's query.
        has_norms_last: Whether norms follow attention and MLP, so that their input is the residual stream
            itself.
        flattened: Leaves whose values are ``[batch * tokens, width]``, at least in some layers.
        router_order: The index of logits, weights and ids in what a router of experts returns. Without the
            last, it returns weights for all experts, and zero for those that are not chosen.
        routes_probabilities: Whether that router returns the softmax of its logits in their place.
        has_stream: Whether blocks pass on one residual stream, which then has points.
        has_pattern: Whether attention's probabilities are a point, although no module takes them.
        changed_in_place: Leaves whose tensor the model goes on to change.
        encoder: The list of blocks of the vision encoder, which return the rows of patches; empty if there is
            none.
    """

    model_types: tuple[str, ...]
    bodies: tuple[str, ...]
    layers: str
    norm: str
    embed: str
    attention: str
    mlp: str
    leaves: Places
    order: tuple[str, ...] = ORDER
    is_qkv_per_head: bool = False
    has_query_gates: bool = False
    has_norms_last: bool = False
    flattened: frozenset[str] = frozenset()
    router_order: RouterOrder = (0, 1, 2)
    routes_probabilities: bool = False
    has_stream: bool = True
    has_pattern: bool = True
    changed_in_place: frozenset[str] = frozenset()
    encoder: str = ""
