"""The points of one loaded model: a family's table, or what its structure showed, resolved against it.

Invariant: every leaf that ``leaf_specs`` lists can be located on every layer that it names and this rank
holds, and ``view`` shares memory with the tensor that the module computes with (``mixer.state`` has no view).

States of Mamba-2 mixers are in vLLM's KV cache, one block for each request. Kernels update them in place:
after a call it is the state after the step's last position; no other exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast, get_args

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from api_schemas.operations import AnyOperation, PointOperation
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.model_spec import (
    EXPERTS,
    HEADS,
    KEYS,
    LATENT,
    NEURONS,
    PATTERN,
    QUERIES,
    ROUTED,
    ROUTER,
    SHARED,
    STATE,
    VALUES,
    LeafSpec,
)
from nnsight_engine.families.layout import EngineFamily, Place, leaves_in, parts_of
from nnsight_engine.families.registry import ENGINE_FAMILIES, engine_family
from nnsight_engine.plans.step.context import Stage
from nnsight_engine.vllm_backend.module_tree import BlockPoints, ModelLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from nnsight_engine.vllm_backend.hooks import InnerExperts


def mixer_state_shape(mixer: Any) -> tuple[int, ...]:
    """Return heads, head_dim and state_size; empty with ``--use-replayssm``, which keeps an old state."""
    if mixer.use_replayssm:
        return ()
    return (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)


@dataclasses.dataclass(frozen=True, slots=True)
class MixerStates:
    """One mixer's states: a view ``[slots, heads * head_dim * state_size]``, and the slot of each request."""

    held: torch.Tensor
    slots: torch.Tensor

    @staticmethod
    def of(mixer: Any) -> MixerStates:
        """Return the states of a mixer; to be called before the model's next step."""
        metadata: Any = get_forward_context().attn_metadata
        step = metadata[mixer.prefix]
        # The requests that decode come first. With drafts, each has further slots, for the state after each.
        parts = []
        if step.num_decodes:
            parts.append(step.state_indices_tensor_d[: step.num_decodes, 0])
        if step.num_prefills:
            parts.append(step.state_indices_tensor_p)
        held = mixer.kv_cache[1]
        return MixerStates(held.view(len(held), -1), torch.cat(parts))

    def of_request(self, index: int) -> torch.Tensor:
        """Return a copy of the state of one of the step's requests, flat."""
        return self.held.index_select(0, self.slots[index : index + 1])[0]


def _unknown(class_name: str, architectures: Sequence[str]) -> UnsupportedOptionError:
    supported = [name for family in ENGINE_FAMILIES for name in family.architectures or family.model_classes]
    return UnsupportedOptionError(
        f"the architecture must be one of {', '.join(supported)}, "
        f"got {', '.join(architectures) or 'none'} (vLLM class {class_name}); serve another model, "
        "drop --model-impl transformers if it was given, or drop --points strict"
    )


VALUE_OPERATIONS: Final[tuple[str, ...]] = tuple(
    schema.model_fields["op"].default
    for schema in get_args(AnyOperation)
    if issubclass(schema, PointOperation)
)
"""Operations supported at every point whose value is a vector."""

FORCING_OPERATIONS: Final = ("ablate", "patch", "capture")
"""Operations at the ids of chosen experts: writes that give ids, and reads."""

PARTIAL_LEAVES: Final = frozenset({ROUTED, SHARED, STATE})
"""Leaves of which each tensor-parallel rank has a summand, or a part that is not put together."""

SHARDED_LEAVES: Final = frozenset({QUERIES, KEYS, VALUES, HEADS, "mlp.gate", "mlp.up", NEURONS})
"""Leaves of which each tensor-parallel rank computes only its own columns."""

_QKV: Final = ("q", "k", "v")
_LANGUAGE_MODEL: Final = "language_model"
"""Where models that see have a language model of another family; vLLM names it so in all of them."""
_POOLING_ADAPTERS: Final = "vllm.model_executor.models.adapters"
"""The module whose classes pool the hidden states of other models."""

Blocks = dict[int, BlockPoints]
"""The blocks that a pipeline stage holds, by layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelPoints:
    """The layout of one loaded model, with its modules; sizes are those of the whole model, not of a rank.

    Attributes:
        layers: All blocks of the model in order; blocks of other pipeline stages are vLLM's placeholders.
        project_out: Projection between the final norm and the unembedding, or None.
        generates: Whether it generates tokens, and has an unembedding.
    """

    model: nn.Module
    layout: ModelLayout
    layers: tuple[nn.Module, ...]
    local_layers: range
    final_norm: nn.Module | None
    project_out: nn.Module | None
    hidden_size: int
    vocab_size: int
    tensor_parallel_size: int
    generates: bool = True
    encoder: tuple[nn.Module, ...] = ()

    @property
    def family(self) -> EngineFamily:
        return self.layout.family

    @property
    def returns_residual(self) -> bool:
        """Whether blocks return ``(hidden, residual)`` instead of one tensor."""
        return self.family.returns_residual

    @property
    def has_stream(self) -> bool:
        """Whether the blocks' residual stream is known, and is one tensor or the sum of two."""
        return bool(self.layers) and self.family.has_stream

    @property
    def stage(self) -> Stage:
        stop = self.local_layers.stop
        return Stage(self.local_layers.start, None if stop == len(self.layers) else stop)

    def locate(self, leaf: str, layer: int) -> tuple[nn.Module, Place]:
        """Return a leaf's module and its location in it; raise LookupError if block or stage lacks it."""
        if layer not in self.local_layers:
            layers_here = f"{self.local_layers.start} to {self.local_layers.stop - 1}"
            raise LookupError(
                f"this pipeline stage holds layers {layers_here}, got {layer}; ask the stage that has it"
            )
        leaves = self.layout.blocks[layer].leaves
        spec = leaves.get(leaf)
        if spec is None:
            raise LookupError(
                f"the leaf must be one of {', '.join(leaves)}, got {leaf!r}; residual points are taps"
            )
        return self.layers[layer].get_submodule(spec.path), spec

    def choices(self) -> dict[str, int]:
        """Return the number of experts by module path, for modules whose output is expert ids to replace."""
        return {
            f"{self.family.layers}.{layer}.{block.leaves[EXPERTS].path}": block.num_experts
            for layer, block in enumerate(self.layout.blocks)
            if block.forces_experts
        }

    def attention(self, layer: int) -> nn.Module:
        return self.layers[layer].get_submodule(self.layout.blocks[layer].kernel)

    def value(self, spec: Place, hooked: object) -> torch.Tensor:
        """Return the tensor from the arguments or the output that a hook received.

        Raises:
            TypeError: The module computes with something else, such as an activation that vLLM quantized.
        """
        tensor = hooked[0] if isinstance(hooked, tuple) and hooked else hooked
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"the {spec.side} of {spec.path} must be a tensor, got {type(tensor).__name__}; "
                "fused quantization hides this point, serve the model without it"
            )
        return tensor

    def view(self, spec: Place, value: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the rows of a layer's leaf ``[tokens, *leaf shape]`` as a view into ``value``.

        Only write to views of outputs: an input may be a tensor that the block still needs (OPT-350m's
        ``mlp.input``).
        """
        rows = value[0] if self.family.is_batched else value
        block = self.layout.blocks[layer]
        if spec.part in _QKV:
            return self._heads(block, spec.part, rows)
        if spec.part:
            start = block.inner_size if spec.part == "up" else 0
            return rows[..., start : start + block.inner_size]
        if spec in (block.leaves.get(HEADS), block.leaves.get(QUERIES)):
            return _split_last(rows, block.num_heads, block.head_dim)
        return rows

    def _heads(self, block: BlockPoints, part: str, rows: torch.Tensor) -> torch.Tensor:
        """Return the queries, keys or values, by ``part``, among the columns of a fused projection."""
        index = _QKV.index(part)
        if self.family.is_qkv_interleaved:
            return _split_last(rows, block.num_heads, len(_QKV), block.head_dim)[..., index, :]
        head_counts = (block.num_heads, block.num_kv_heads, block.num_kv_heads)
        if self.family.has_query_gates:
            if part == "q":
                queries_and_gates = _split_last(
                    rows[..., : 2 * block.num_heads * block.head_dim], block.num_heads, 2, -1
                )
                return queries_and_gates[..., 0, :]
            # Without as many columns as gates have, keys and values are where they are without gates.
            rows = rows[..., block.num_heads * block.head_dim :]
        start = sum(head_counts[:index]) * block.head_dim
        columns = rows[..., start : start + head_counts[index] * block.head_dim]
        return _split_last(columns, head_counts[index], block.head_dim)

    def lens_logits(self, residual: torch.Tensor) -> torch.Tensor | None:
        """Return logits ``[n, vocab]`` of residual rows ``[n, hidden]``, read as the last block's output.

        Replaced ``forward`` methods and hooks do not run, so that a lens never triggers other operations. All
        tensor-parallel ranks must call this together, with the same rows. None on a rank without logits.
        """
        if not self.stage.is_last:
            return None
        model_class: Any = type(self.model)
        hidden = residual
        # The rows were computed under inference mode; this method may be called outside of it.
        with torch.inference_mode():
            if self.final_norm is not None:
                hidden = _plain_forward(self.final_norm, hidden)
            if self.project_out is not None:
                hidden = _plain_forward(self.project_out, hidden)
            logits: torch.Tensor | None = model_class.compute_logits(self.model, hidden)
            return logits

    def leaf_specs(self, *, wholes: bool = False) -> tuple[LeafSpec, ...]:
        """Return the model's points; those that each rank has a part of only with ``wholes``, for traces."""
        everything = wholes or self.tensor_parallel_size == 1
        hidden = (self.hidden_size,)
        specs = []
        if self.has_stream:
            lens = ["logit_lens"] if self.generates and self.family.final_norm else []
            specs += [
                LeafSpec("embed.output", hidden, "tap", VALUE_OPERATIONS),
                LeafSpec("input", hidden, "tap", VALUE_OPERATIONS),
                LeafSpec("output", hidden, "tap", (*VALUE_OPERATIONS, *lens)),
            ]
        missing = PARTIAL_LEAVES if self.tensor_parallel_size > 1 else frozenset()
        missing |= frozenset() if everything else {*SHARDED_LEAVES, PATTERN}
        specs += [
            LeafSpec(
                leaf,
                shape,
                "eager",
                self._operations(leaf, layers[0]),
                None if len(layers) == len(self.layers) else tuple(layers),
            )
            for (leaf, shape), layers in self._shaped_leaves().items()
            if leaf not in missing
        ]
        if self.final_norm is not None:
            specs.append(LeafSpec("norm.output", hidden, "tap", VALUE_OPERATIONS))
        if self.generates:
            specs.append(LeafSpec("logits", (self.vocab_size,), "tap", VALUE_OPERATIONS))
            specs.append(LeafSpec("samples", (), "tap", ("capture",)))
        return tuple(specs)

    def _operations(self, leaf: str, layer: int) -> tuple[str, ...]:
        if leaf == EXPERTS and self.layout.blocks[layer].forces_experts:
            return FORCING_OPERATIONS
        return ("capture",) if leaf in {PATTERN, EXPERTS, STATE} else VALUE_OPERATIONS

    def _shaped_leaves(self) -> dict[tuple[str, tuple[int, ...]], list[int]]:
        """Return the layers that have a leaf in a shape, by leaf and shape."""
        layers_by_shape: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for layer, block in enumerate(self.layout.blocks):
            for leaf, shape in block.shapes(self.hidden_size).items():
                layers_by_shape.setdefault((leaf, shape), []).append(layer)
        return layers_by_shape


def resolve_points(
    model: nn.Module,
    config: Any,
    *,
    tensor_parallel_size: int = 1,
    generates: bool = True,
    is_causal: bool = True,
    find: Callable[[], EngineFamily] | None = None,
    gather: Callable[[Blocks], Sequence[Blocks]] = lambda blocks: [blocks],
) -> ModelPoints:
    """Resolve the points of a loaded model.

    ``find`` finds the parts of a model of no table; None to refuse it. ``gather`` returns all stages' blocks.

    Raises:
        UnsupportedOptionError: No table matches the model on so many ranks.
    """
    name, architectures = served_class(model).__name__, config.architectures or []
    family = engine_family(name, architectures) or _inner_family(model, architectures)
    is_summed = family is not None and family.sums_at_once and tensor_parallel_size > 1
    if (family is None or is_summed) and find is not None:
        family = find()
    elif is_summed:
        raise UnsupportedOptionError(
            f"{type(model).__name__} with --tensor-parallel-size has the residual stream only: no rank has "
            "the outputs of attention and MLP, which are summed before they are reduced; serve it without "
            "--points strict"
        )
    if family is None:
        raise _unknown(name, architectures)
    layers = tuple(model.get_submodule(family.layers).children()) if family.layers else ()
    # vLLM's placeholders for blocks of other pipeline stages contain no modules.
    layers_here = [index for index, layer in enumerate(layers) if next(layer.children(), None) is not None]
    if family.layers and not layers_here:
        raise UnsupportedOptionError(f"{type(model).__name__} has no decoder blocks at {family.layers}")
    blocks_here = {
        index: dataclasses.replace(_block_points(layers[index], family, config), is_causal=is_causal)
        for index in layers_here
    }
    blocks = {layer: block for stage_blocks in gather(blocks_here) for layer, block in stage_blocks.items()}
    return ModelPoints(
        model=model,
        layout=ModelLayout(family, tuple(blocks[layer] for layer in sorted(blocks))),
        layers=layers,
        local_layers=range(layers_here[0], layers_here[-1] + 1) if layers_here else range(0),
        final_norm=_optional_module(model, family.final_norm) if family.final_norm else None,
        project_out=_optional_module(model, family.project_out) if family.project_out else None,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        tensor_parallel_size=tensor_parallel_size,
        generates=generates,
        encoder=_encoder(model, family),
    )


def _block_points(block: nn.Module, family: EngineFamily, config: Any) -> BlockPoints:
    """Return the points of one block, with their sizes."""
    modules = dict(block.named_modules(remove_duplicate=False))
    leaves = leaves_in(parts_of(block), family.leaves)
    state_shape = mixer_state_shape(modules[leaves[STATE].path]) if STATE in leaves else ()
    if not state_shape:
        leaves.pop(STATE, None)
    num_heads: int = getattr(config, "num_attention_heads", 0)  # a model without attention states none
    inner = _inner_experts(block, leaves)
    # Sizes are read from the projections, since configs differ in which sizes they state and under which
    # names.
    return BlockPoints(
        leaves=leaves,
        kernel=family.kernel if family.kernel in modules else "",
        num_heads=num_heads,
        latent_size=config.kv_lora_rank if LATENT in leaves else 0,
        num_kv_heads=_num_kv_heads(block, leaves, config) or num_heads,
        head_dim=_input_size(block, leaves["attn.heads"]) // num_heads if "attn.heads" in leaves else 0,
        inner_size=_input_size(block, leaves["mlp.act"]) if "mlp.act" in leaves else 0,
        num_experts=_output_size(block, leaves[ROUTER]) if ROUTER in leaves else 0,
        num_chosen=0 if inner is None else inner.top_k,
        forces_experts=inner is not None and inner.weights_of is not None,
        hides_pattern=not family.has_pattern or bool(getattr(modules.get(family.kernel), "has_sink", False)),
        state_shape=state_shape,
    )


def _inner_family(model: nn.Module, architectures: Sequence[str]) -> EngineFamily | None:
    """Return the table for the language model inside of a model that sees, with paths in the whole model."""
    inner = getattr(model, _LANGUAGE_MODEL, None)
    family = None if inner is None else engine_family(type(inner).__name__, architectures)
    if family is None:
        return None
    return dataclasses.replace(
        family,
        layers=f"{_LANGUAGE_MODEL}.{family.layers}",
        final_norm=f"{_LANGUAGE_MODEL}.{family.final_norm}",
        project_out=family.project_out and f"{_LANGUAGE_MODEL}.{family.project_out}",
    )


def _encoder(model: nn.Module, family: EngineFamily) -> tuple[nn.Module, ...]:
    """Return the blocks of the vision encoder, which vLLM does not load where a model serves text only."""
    encoder = dict(model.named_modules()).get(family.encoder) if family.encoder else None
    return () if encoder is None else tuple(encoder.children())


def _inner_experts(block: nn.Module, leaves: Mapping[str, Place]) -> InnerExperts | None:
    """Return a block's ``InnerExperts``, which its leaf of expert ids is in; None without such a leaf."""
    spec = leaves.get(EXPERTS)
    if spec is None:
        return None
    return cast("InnerExperts", block.get_submodule(spec.path.rpartition(".")[0]))


def served_class(model: nn.Module) -> type:
    """Return a model's class, without the subclass that vLLM makes of it to pool its hidden states."""
    return next(kind for kind in type(model).__mro__ if kind.__module__ != _POOLING_ADAPTERS)


def _optional_module(model: nn.Module, path: str) -> nn.Module | None:
    parent, _, name = path.rpartition(".")
    module: nn.Module | None = getattr(model.get_submodule(parent), name)
    return module


def base_module(module: nn.Module) -> nn.Module:
    """Return the projection inside vLLM's wrapper for LoRA adapters, or the module itself."""
    base: nn.Module | None = getattr(module, "base_layer", None)
    return module if base is None else base


def _input_size(block: nn.Module, spec: Place) -> int:
    projection: Any = base_module(block.get_submodule(spec.path))
    return int(projection.input_size)


def _num_kv_heads(block: nn.Module, leaves: Mapping[str, Place], config: Any) -> int:
    """Return a block's number of key and value heads; 0 if it has none of its own, or as many as queries."""
    values = leaves.get(VALUES)
    if values is None:
        return 0
    projection = base_module(block.get_submodule(values.path))
    total: int | None = getattr(projection, "total_num_kv_heads", None)
    return total or getattr(config, "num_key_value_heads", None) or 0


def _output_size(block: nn.Module, spec: Place) -> int:
    projection: Any = block.get_submodule(spec.path)
    return int(projection.output_size)


def _plain_forward(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Run ``forward`` of the module's class, without replacements and hooks of this instance."""
    result = type(module).forward(module, rows)
    return cast("torch.Tensor", result[0] if isinstance(result, tuple) else result)


def _split_last(rows: torch.Tensor, *sizes: int) -> torch.Tensor:
    return rows.view(*rows.shape[:-1], *sizes)
