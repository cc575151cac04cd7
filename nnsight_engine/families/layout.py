"""Where the points of a family are in its decoder blocks: in vLLM's models, and in transformers' models."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from nnsight_engine.core.model_spec import HEADS, KEYS, NEURONS, ORDER, QUERIES, VALUES

if TYPE_CHECKING:
    import torch
    from torch import nn

Side = Literal["input", "output"]
Part = Literal["", "q", "k", "v", "gate", "up", "weights", "ids"]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A module of a block, one of its sides, and the blocks that have a leaf there.

    ``input`` is the module's first positional argument; ``output`` is its return value, or the first item of
    a tuple.

    Attributes:
        path: The module, below the block; empty for the block itself.
        part: Part of a fused output, or an item of what a router returns; empty for the whole tensor.
        operation: The operation inside the module's ``forward`` whose output it is, as ``source`` names it;
            empty for the module's own.
        needs: A module or parameter of the block without which it does not have the leaf; empty for none.
        lacks: A module or parameter of the block with which it does not have the leaf; empty for none.
    """

    path: str
    side: Side
    part: Part = ""
    operation: str = ""
    needs: str = dataclasses.field(default="", kw_only=True)
    lacks: str = dataclasses.field(default="", kw_only=True)

    def is_in(self, parts: Collection[str]) -> bool:
        is_excluded = bool(self.lacks) and self.lacks in parts
        return self.path in parts and not is_excluded and (not self.needs or self.needs in parts)


Places = Mapping[str, Place | tuple[Place, ...]]
"""The place of each leaf; of several, a block has the leaf at the first that is in it."""


def parts_of(block: nn.Module) -> set[str]:
    """Return the paths of a block's modules and parameters, which tell what leaves it has."""
    modules = {name for name, _ in block.named_modules(remove_duplicate=False)}
    return modules | {name for name, _ in block.named_parameters(remove_duplicate=False)}


def leaves_in(parts: Collection[str], places: Places) -> dict[str, Place]:
    """Return the leaves that a block with these parts has, see ``parts_of``, and their places."""
    leaves = {}
    for leaf, options in places.items():
        candidates = options if isinstance(options, tuple) else (options,)
        place = next((candidate for candidate in candidates if candidate.is_in(parts)), None)
        if place is not None:
            leaves[leaf] = place
    return leaves


def stream_leaves() -> dict[str, Place]:
    return {"input": Place("", "input"), "output": Place("", "output")}


def attention_leaves(
    module: str, *, qkv: str | tuple[str, str, str], out: str, ends_at_out: bool = False
) -> dict[str, Place]:
    """Return the leaves of attention; paths are below its module.

    ``qkv`` is a single fused projection, or three. ``ends_at_out``: ``attn.output`` is what ``out`` returns,
    where the module returns a tuple or something else.
    """
    if isinstance(qkv, str):
        projected = {
            QUERIES: Place(f"{module}.{qkv}", "output", "q"),
            KEYS: Place(f"{module}.{qkv}", "output", "k"),
            VALUES: Place(f"{module}.{qkv}", "output", "v"),
        }
    else:
        paths = zip((QUERIES, KEYS, VALUES), qkv, strict=True)
        projected = {leaf: Place(f"{module}.{path}", "output") for leaf, path in paths}
    end = f"{module}.{out}"
    return {
        "attn.output": Place(end if ends_at_out else module, "output"),
        **projected,
        HEADS: Place(end, "input"),
    }


def mlp_leaves(
    module: str, *, down: str, up: str = "", gate: str = "", gate_up: str = "", lacks: str = ""
) -> dict[str, Place]:
    """Return the leaves of an MLP; paths are below its module, or below the block if that is empty.

    ``gate_up``: a projection that returns the gate, then the other input of its product. ``lacks``: see
    ``Place``.
    """
    prefix = f"{module}." if module else ""
    leaves = {
        "mlp.input": Place(module or up, "input"),
        "mlp.output": Place(module or down, "output"),
        "mlp.up": Place(prefix + (gate_up or up), "output", "up" if gate_up else ""),
        NEURONS: Place(prefix + down, "input"),
    }
    if gate or gate_up:
        leaves["mlp.gate"] = Place(prefix + (gate_up or gate), "output", "gate" if gate_up else "")
    return {leaf: dataclasses.replace(place, lacks=lacks) for leaf, place in leaves.items()}


def without(names: Collection[str], leaves: Mapping[str, Place]) -> dict[str, Place]:
    return {leaf: place for leaf, place in leaves.items() if leaf not in names}


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFamily:
    """One layout of decoder blocks in vLLM, shared by all the model classes it names.

    Attributes:
        model_classes: Names of the vLLM model classes with this layout, and of architectures that they serve
            under another name.
        architectures: Entries of the config's ``architectures`` to which the table applies; empty if the
            class alone decides. Needed for vLLM's Transformers backend, where one class serves all models.
        layers: Path of the list of decoder blocks; empty if the residual stream is not known.
        final_norm: Path of the final norm, empty if it is not known; the module may be None (OPT-350m).
        leaves: Location of each leaf of a layer, without the residual stream's ``input`` and ``output``. A
            block has those whose modules it has.
        kernel: Path, relative to the layer, of vLLM's ``Attention``, which receives queries and keys; empty
            if it is not known.
        order: The leaves in the order in which a block computes them.
        project_out: Path of a projection between the final norm and the unembedding, or empty.
        hidden_index: Position of the hidden states among the parameters of a block's ``forward``.
        hidden_name: Name of that parameter, which some models use to call blocks.
        has_stream: Whether blocks pass on one residual stream, which then has points.
        returns_none: Whether blocks return ``(stream, None)``.
        returns_residual: Whether blocks return ``(hidden, residual)``, whose sum is the residual stream.
            Otherwise blocks take and return the residual stream itself, as one tensor.
        has_unused_residual: Whether ``hidden`` is the whole stream, and nothing reads the second tensor,
            which is then replaced by zeros, so that the sum is right.
        sums_at_once: Whether attention and MLP are summed before they are reduced over tensor-parallel ranks,
            none of which then has their values. The table then holds for a single rank only.
        is_batched: Whether values have a leading axis of size 1 (``[1, tokens, width]``).
        is_qkv_interleaved: Whether the fused output is ``[heads, (q, k, v), head_dim]`` instead of all of q,
            then all of k, then all of v.
        has_query_gates: Whether the projection of queries returns a gate after each head's query.
        is_kernel_bare: Whether the attention module calls the kernel's ``forward`` directly, so that hooks on
            the kernel module do not run.
        has_pattern: Whether attention's probabilities are a point if queries and keys are.
        encoder: Path of the list of blocks of the vision encoder, which take and return the rows of patches;
            empty if it is not known.
        merged_patches: Field of the config with the number of patches of each side that become one row of the
            stream.
    """

    name: str
    model_classes: tuple[str, ...]
    layers: str
    final_norm: str
    leaves: Places
    kernel: str
    architectures: tuple[str, ...] = ()
    order: tuple[str, ...] = ORDER
    project_out: str = ""
    hidden_index: int = 0
    hidden_name: str = "hidden_states"
    has_stream: bool = True
    returns_none: bool = False
    returns_residual: bool = False
    has_unused_residual: bool = False
    sums_at_once: bool = False
    is_batched: bool = False
    is_qkv_interleaved: bool = False
    has_query_gates: bool = False
    is_kernel_bare: bool = False
    has_pattern: bool = True
    encoder: str = ""
    merged_patches: str = ""

    def hidden_key(self, args: Sequence[Any]) -> int | str:
        """Return where a call of a block has the hidden states: their position, or their name."""
        return self.hidden_index if self.hidden_index < len(args) else self.hidden_name

    def hidden_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        key = self.hidden_key(args)
        hidden: torch.Tensor = args[key] if isinstance(key, int) else kwargs[key]
        return hidden

    def residual_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the stream's second tensor among the arguments of a call of a block; None without it."""
        if not self.returns_residual:
            return None
        key = self.hidden_key(args)
        if isinstance(key, int) and key + 1 < len(args):
            residual: torch.Tensor | None = args[key + 1]
            return residual
        return kwargs.get("residual")


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
