"""Location of each point of the vocabulary in the module tree of each model family in vLLM.

A point such as ``layers.3.attn.q`` means the same on every architecture, but vLLM fuses, splits and names
modules differently in each. The tables in this module say which module carries a point, and on which side of
the module. ``ModelPoints`` is a table resolved against one loaded model. The runner builds it once after the
weights are loaded, and places taps and hooks with it.

Invariant: every leaf that ``leaf_specs`` lists can be located on every layer that this rank holds, and the
tensor that ``view`` returns shares memory with the tensor that the module computes with.
"""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

import torch

from nnsight_engine.core.model_spec import PATTERN_LEAF, LeafSpec
from nnsight_engine.plans.step.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

Part = Literal["", "q", "k", "v", "gate", "up"]

VALUE_OPERATIONS: Final = ("steer", "ablate", "patch", "capture", "probe")
"""Operations supported at every point whose value is a vector."""

SHARDED_LEAVES: Final = frozenset(
    {"attn.q", "attn.k", "attn.v", "attn.heads", "mlp.gate", "mlp.up", "mlp.act"}
)
"""Leaves of which each tensor-parallel rank computes only its own columns."""

ROUTER: Final = "moe.router"
_QKV: Final = ("q", "k", "v")
_POOLING_ADAPTERS: Final = "vllm.model_executor.models.adapters"
"""The module whose classes pool the hidden states of other models."""


class UnsupportedModelError(Exception):
    """The loaded model's architecture is in no table, or its modules do not match its table."""


class TextConfig(Protocol):
    """The fields read from a Hugging Face text config (``ModelConfig.hf_text_config``)."""

    architectures: list[str] | None
    hidden_size: int
    num_attention_heads: int
    vocab_size: int


class _Linear(Protocol):
    input_size: int
    output_size: int


class _CausalModel(Protocol):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class HookSpec:
    """The location of a leaf's value: a module, one of its sides, and a part of the tensor.

    Attributes:
        path: Module path relative to the layer, such as ``self_attn.qkv_proj``.
        side: ``input`` is the module's first positional argument; every listed module is called with one.
            ``output`` is the return value, or its first element if the module returns a tuple.
        part: Part of a fused output; empty for the whole tensor.
    """

    path: str
    side: Literal["input", "output"]
    part: Part = ""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFamily:
    """One layout of decoder blocks, shared by all the model classes it names.

    Attributes:
        name: Key of the table.
        model_classes: Names of the vLLM model classes with this layout, and of architectures that they serve
            under another name.
        architectures: Entries of the config's ``architectures`` to which the table applies; empty if the
            class alone decides. Needed for vLLM's Transformers backend, where one class serves all models.
        layers: Path of the list of decoder blocks.
        final_norm: Path of the final norm; the module may be None (OPT-350m).
        leaves: Location of each leaf of a layer, without the residual stream's ``input`` and ``output``.
        kernel: Path, relative to the layer, of vLLM's ``Attention``, which receives queries and keys.
        project_out: Path of a projection between the final norm and the unembedding, or empty.
        hidden_index: Position of the hidden states among the arguments of a block's ``forward``.
        returns_residual: Whether blocks return ``(hidden, residual)``, whose sum is the residual stream.
            Otherwise blocks take and return the residual stream itself, as one tensor.
        has_unused_residual: Whether ``hidden`` is the whole stream, and nothing reads the second tensor,
            which is then replaced by zeros, so that the sum is right.
        sums_at_once: Whether attention and MLP are summed before they are reduced over tensor-parallel ranks,
            none of which then has their values.
        is_batched: Whether values have a leading axis of size 1 (``[1, tokens, width]``).
        is_qkv_interleaved: Whether the fused output is ``[heads, (q, k, v), head_dim]`` instead of all of q,
            then all of k, then all of v.
        is_kernel_bare: Whether the attention module calls the kernel's ``forward`` directly, so that hooks on
            the kernel module do not run.
    """

    name: str
    model_classes: tuple[str, ...]
    layers: str
    final_norm: str
    leaves: Mapping[str, HookSpec]
    kernel: str
    architectures: tuple[str, ...] = ()
    project_out: str = ""
    hidden_index: int = 0
    returns_residual: bool = False
    has_unused_residual: bool = False
    sums_at_once: bool = False
    is_batched: bool = False
    is_qkv_interleaved: bool = False
    is_kernel_bare: bool = False

    @property
    def attention(self) -> str:
        """Path of the attention module, relative to a block."""
        return self.kernel.rpartition(".")[0]

    @property
    def mlp(self) -> str:
        """Path of the MLP, relative to a block; empty if the MLP's modules belong to the block itself."""
        first, last = self.leaves["mlp.input"].path, self.leaves["mlp.output"].path
        return first if first == last else ""


def _leaves(*, attention: str, qkv: str, out: str, mlp: str, up: str, down: str) -> dict[str, HookSpec]:
    """Return the leaves of a block whose attention and MLP modules are called with one tensor.

    All paths are relative to the layer. ``attention`` is the module that returns ``attn.output``; ``qkv`` and
    ``out`` are its projections; ``up`` and ``down`` are the projections of the MLP.
    """
    return {
        "attn.output": HookSpec(attention, "output"),
        "attn.q": HookSpec(qkv, "output", "q"),
        "attn.k": HookSpec(qkv, "output", "k"),
        "attn.v": HookSpec(qkv, "output", "v"),
        "attn.heads": HookSpec(out, "input"),
        "mlp.input": HookSpec(mlp, "input"),
        "mlp.output": HookSpec(mlp, "output"),
        "mlp.up": HookSpec(up, "output"),
        "mlp.act": HookSpec(down, "input"),
    }


_LLAMA_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    _leaves(
        attention="self_attn",
        qkv="self_attn.qkv_proj",
        out="self_attn.o_proj",
        mlp="mlp",
        up="mlp.gate_up_proj",
        down="mlp.down_proj",
    )
    | {
        "mlp.gate": HookSpec("mlp.gate_up_proj", "output", "gate"),
        "mlp.up": HookSpec("mlp.gate_up_proj", "output", "up"),
    }
)


def _experts(mlp: str) -> Mapping[str, HookSpec]:
    """Return the leaves of a block with Llama's attention whose MLP, at least in some layers, has experts."""
    leaves = {leaf: spec for leaf, spec in _LLAMA_LEAVES.items() if not leaf.startswith("mlp.")}
    return types.MappingProxyType(
        leaves
        | {
            "mlp.input": HookSpec(mlp, "input"),
            ROUTER: HookSpec(f"{mlp}.gate", "output"),
            "mlp.output": HookSpec(mlp, "output"),
        }
    )


_NEMOTRON_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    _leaves(
        attention="self_attn",
        qkv="self_attn.qkv_proj",
        out="self_attn.o_proj",
        mlp="mlp",
        up="mlp.up_proj",
        down="mlp.down_proj",
    )
)

# Modules of transformers return (output, weights), so the output of the projection is used instead.
_TRANSFORMERS_LLAMA_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    {**_LLAMA_LEAVES, "attn.output": HookSpec("self_attn.o_proj", "output")}
)

_PHI_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    _leaves(
        attention="self_attn.dense",
        qkv="self_attn.qkv_proj",
        out="self_attn.dense",
        mlp="mlp",
        up="mlp.fc1",
        down="mlp.fc2",
    )
)

_STARCODER2_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    _leaves(
        attention="self_attn.o_proj",
        qkv="self_attn.qkv_proj",
        out="self_attn.o_proj",
        mlp="mlp",
        up="mlp.c_fc",
        down="mlp.c_proj",
    )
)

_GPT2_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    _leaves(
        attention="attn", qkv="attn.c_attn", out="attn.c_proj", mlp="mlp", up="mlp.c_fc", down="mlp.c_proj"
    )
)

# In OPT the MLP is two linear layers of the block itself, so its input and output are theirs.
_OPT_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    _leaves(
        attention="self_attn",
        qkv="self_attn.qkv_proj",
        out="self_attn.out_proj",
        mlp="fc1",
        up="fc1",
        down="fc2",
    )
    | {"mlp.output": HookSpec("fc2", "output")}
)

# The attention module returns (output, weights), so the output of its projection is used instead.
_GPT_NEOX_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    _leaves(
        attention="attention.dense",
        qkv="attention.query_key_value",
        out="attention.dense",
        mlp="mlp",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )
)

_LLAMA: Final = EngineFamily(
    name="llama",
    model_classes=(
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4ForCausalLM",
        "Phi3ForCausalLM",
    ),
    layers="model.layers",
    final_norm="model.norm",
    leaves=_LLAMA_LEAVES,
    kernel="self_attn.attn",
    hidden_index=1,
    returns_residual=True,
)

# vLLM 0.32 has no implementation of these. Its Transformers backend runs transformers' modules with vLLM's
# linear layers, and fuses projections that transformers keeps apart.
_TRANSFORMERS_LLAMA: Final = EngineFamily(
    name="transformers_llama",
    model_classes=("TransformersForCausalLM",),
    architectures=(
        "GlmForCausalLM",
        "MinistralForCausalLM",
        "OlmoForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "SmolLM3ForCausalLM",
    ),
    layers="model.layers",
    final_norm="model.norm",
    leaves=_TRANSFORMERS_LLAMA_LEAVES,
    kernel="self_attn.attn",
    is_batched=True,
    is_kernel_bare=True,
)

FAMILIES: Final = (
    _LLAMA,
    dataclasses.replace(
        _LLAMA,
        name="moe",
        model_classes=(
            "Glm4MoeForCausalLM",
            "OlmoeForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
        ),
        leaves=_experts("mlp"),
    ),
    dataclasses.replace(
        _LLAMA, name="mixtral", model_classes=("MixtralForCausalLM",), leaves=_experts("block_sparse_moe")
    ),
    dataclasses.replace(
        _LLAMA,
        name="cohere",
        model_classes=("CohereForCausalLM", "Cohere2ForCausalLM"),
        has_unused_residual=True,
        sums_at_once=True,
    ),
    dataclasses.replace(
        _LLAMA,
        name="exaone4",
        model_classes=("Exaone4ForCausalLM", "StablelmForCausalLM", "StableLmForCausalLM"),
        has_unused_residual=True,
    ),
    dataclasses.replace(
        _LLAMA, name="granite", model_classes=("GraniteForCausalLM",), returns_residual=False
    ),
    dataclasses.replace(
        _LLAMA, name="nemotron", model_classes=("NemotronForCausalLM",), leaves=_NEMOTRON_LEAVES
    ),
    EngineFamily(
        name="gpt2",
        model_classes=("GPT2LMHeadModel",),
        layers="transformer.h",
        final_norm="transformer.ln_f",
        leaves=_GPT2_LEAVES,
        kernel="attn.attn",
    ),
    EngineFamily(
        name="opt",
        model_classes=("OPTForCausalLM",),
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        project_out="model.decoder.project_out",
        leaves=_OPT_LEAVES,
        kernel="self_attn.attn",
    ),
    _TRANSFORMERS_LLAMA,
    dataclasses.replace(
        _TRANSFORMERS_LLAMA,
        name="phi",
        architectures=("PhiForCausalLM",),
        final_norm="model.final_layernorm",
        leaves=_PHI_LEAVES,
    ),
    dataclasses.replace(
        _TRANSFORMERS_LLAMA,
        name="starcoder2",
        architectures=("Starcoder2ForCausalLM",),
        leaves=_STARCODER2_LEAVES,
    ),
    # Its fused projection has transformers' layout, one head after the other.
    dataclasses.replace(
        _TRANSFORMERS_LLAMA,
        name="gpt_neox",
        architectures=("GPTNeoXForCausalLM",),
        final_norm="model.final_layer_norm",
        leaves=_GPT_NEOX_LEAVES,
        kernel="attention.attn",
        is_qkv_interleaved=True,
    ),
)
"""The tables, one per layout."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelPoints:
    """A family's table resolved against one loaded model; sizes are those of the whole model, not of a rank.

    Attributes:
        model: The model as vLLM loaded it.
        family: The model's table.
        layers: All blocks of the model in order; blocks of other pipeline stages are vLLM's placeholders.
        local_layers: Indices of the blocks that this pipeline stage holds.
        final_norm: The final norm, or None if the model has none.
        project_out: Projection between the final norm and the unembedding, or None.
        tensor_parallel_size: Number of ranks that share each layer.
        num_experts: Width of ``moe.router``; 0 if the model does not have it.
        generates: Whether it generates tokens, and has an unembedding.
    """

    model: nn.Module
    family: EngineFamily
    layers: tuple[nn.Module, ...]
    local_layers: range
    final_norm: nn.Module | None
    project_out: nn.Module | None
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tensor_parallel_size: int
    num_experts: int = 0
    generates: bool = True

    @property
    def returns_residual(self) -> bool:
        """Whether blocks return ``(hidden, residual)`` instead of one tensor."""
        return self.family.returns_residual

    @property
    def stage(self) -> Stage:
        """The part of the model that this worker has."""
        stop = self.local_layers.stop
        return Stage(self.local_layers.start, None if stop == len(self.layers) else stop)

    def locate(self, leaf: str, layer: int) -> tuple[nn.Module, HookSpec]:
        """Return the module that carries ``leaf`` of ``layer``, and the leaf's location in it.

        Args:
            leaf: A leaf of ``family.leaves``.
            layer: Index of a block that this pipeline stage holds.

        Raises:
            LookupError: The family has no such leaf, or this stage does not hold the layer.
        """
        spec = self.family.leaves.get(leaf)
        if spec is None:
            known = ", ".join(self.family.leaves)
            raise LookupError(f"the leaf must be one of {known}, got {leaf!r}; residual points are taps")
        if layer not in self.local_layers:
            held = f"{self.local_layers.start} to {self.local_layers.stop - 1}"
            raise LookupError(
                f"this pipeline stage holds layers {held}, got {layer}; ask the stage that has it"
            )
        return self.layers[layer].get_submodule(spec.path), spec

    def attention(self, layer: int) -> nn.Module:
        """Return vLLM's ``Attention`` of a layer that this pipeline stage holds."""
        return self.layers[layer].get_submodule(self.family.kernel)

    def value(self, spec: HookSpec, hooked: object) -> torch.Tensor:
        """Return the tensor from the arguments or the output that a hook received.

        Args:
            spec: The leaf's location.
            hooked: A pre-hook's positional arguments (side ``input``) or the module's output.

        Raises:
            TypeError: The module computes with something else, such as an activation that vLLM quantized
                together with the activation function.
        """
        first = hooked[0] if isinstance(hooked, tuple) and hooked else hooked
        if not isinstance(first, torch.Tensor):
            raise TypeError(
                f"the {spec.side} of {spec.path} must be a tensor, got {type(first).__name__}; "
                "fused quantization hides this point, serve the model without it"
            )
        return first

    def view(self, spec: HookSpec, value: torch.Tensor) -> torch.Tensor:
        """Return the leaf's rows ``[tokens, *leaf shape]`` as a view into ``value``.

        Writes to the view change ``value``. Only write to views of outputs: an input may be a tensor that the
        block still needs (OPT-350m's ``mlp.input`` is its residual stream). To change an input, clone it,
        write to a view of the clone and pass the clone on.
        """
        rows = value[0] if self.family.is_batched else value
        if spec.part in _QKV:
            return self._heads(spec.part, rows)
        if spec.part:
            start = self.intermediate_size if spec.part == "up" else 0
            return rows[..., start : start + self.intermediate_size]
        if spec == self.family.leaves["attn.heads"]:
            return _split_last(rows, self.num_heads, self.head_dim)
        return rows

    def _heads(self, part: str, rows: torch.Tensor) -> torch.Tensor:
        """Return q, k or v from the fused rows, as ``[tokens, heads, head_dim]``."""
        index = _QKV.index(part)
        if self.family.is_qkv_interleaved:
            return _split_last(rows, self.num_heads, len(_QKV), self.head_dim)[..., index, :]
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        start = sum(heads[:index]) * self.head_dim
        columns = rows[..., start : start + heads[index] * self.head_dim]
        return _split_last(columns, heads[index], self.head_dim)

    def lens_logits(self, residual: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of residual rows, read as if they were the last block's output.

        Applies the final norm, then the model's own unembedding, with the model's logit scales, soft caps and
        OPT's output projection. Replaced ``forward`` methods and hooks on the modules do not run, so that a
        lens never triggers other operations. Every tensor-parallel rank must call this together, with the
        same rows.

        Args:
            residual: ``[n, hidden]`` in the model's dtype; not changed.

        Returns:
            ``[n, vocab]``, or None on a rank on which vLLM does not gather logits, or on an early stage.
        """
        if not self.stage.is_last:
            return None
        model_class = cast("type[_CausalModel]", type(self.model))
        hidden = residual
        # The rows were computed under inference mode; this method may be called outside of it.
        with torch.inference_mode():
            if self.final_norm is not None:
                hidden = _plain_forward(self.final_norm, hidden)
            if self.project_out is not None:
                hidden = _plain_forward(self.project_out, hidden)
            return model_class.compute_logits(cast("_CausalModel", self.model), hidden)

    def leaf_specs(self, *, wholes: bool = False) -> tuple[LeafSpec, ...]:
        """Return the points that this model offers.

        Under tensor parallelism this leaves out the leaves that are sharded over ranks, and the attention
        patterns, of which each rank could compute only its own heads.

        Args:
            wholes: Leave nothing out; for traces, which combine the parts of all ranks.
        """
        everything = wholes or self.tensor_parallel_size == 1
        hidden = (self.hidden_size,)
        specs = [
            LeafSpec("embed.output", hidden, "tap", VALUE_OPERATIONS),
            LeafSpec("input", hidden, "tap", VALUE_OPERATIONS),
            LeafSpec(
                "output", hidden, "tap", (*VALUE_OPERATIONS, *(["logit_lens"] if self.generates else ()))
            ),
        ]
        specs += [
            LeafSpec(leaf, self._shape(leaf), "eager", VALUE_OPERATIONS)
            for leaf in self.family.leaves
            if everything or leaf not in SHARDED_LEAVES
        ]
        if everything:
            specs.append(LeafSpec(PATTERN_LEAF, (self.num_heads, -1), "eager", ("capture",)))
        if self.final_norm is not None:
            specs.append(LeafSpec("norm.output", hidden, "tap", VALUE_OPERATIONS))
        if self.generates:
            specs.append(LeafSpec("logits", (self.vocab_size,), "tap", VALUE_OPERATIONS))
            specs.append(LeafSpec("samples", (), "tap", ("capture",)))
        return tuple(specs)

    def _shape(self, leaf: str) -> tuple[int, ...]:
        """Return the shape of a hooked leaf's value at one position."""
        if leaf in {"attn.q", "attn.heads"}:
            return (self.num_heads, self.head_dim)
        if leaf in {"attn.k", "attn.v"}:
            return (self.num_kv_heads, self.head_dim)
        if leaf in {"mlp.gate", "mlp.up", "mlp.act"}:
            return (self.intermediate_size,)
        return (self.num_experts,) if leaf == ROUTER else (self.hidden_size,)


def resolve_points(
    model: nn.Module, config: TextConfig, *, tensor_parallel_size: int = 1, generates: bool = True
) -> ModelPoints:
    """Resolve the points of a loaded vLLM model.

    Args:
        model: The model that vLLM's loader returned.
        config: Its text config, ``ModelConfig.hf_text_config``.
        tensor_parallel_size: Number of ranks that share each layer.
        generates: Whether it generates tokens, rather than pools its hidden states.

    Raises:
        UnsupportedModelError: No table matches the model.
    """
    family = family_named(_served_class(model).__name__, config.architectures or [])
    if family.sums_at_once and tensor_parallel_size > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} with --tensor-parallel-size is not supported: no rank has the outputs "
            "of attention and MLP, which are summed before they are reduced"
        )
    layers = tuple(model.get_submodule(family.layers).children())
    # vLLM's placeholders for blocks of other pipeline stages contain no modules.
    held = [index for index, layer in enumerate(layers) if next(layer.children(), None) is not None]
    if not held:
        raise UnsupportedModelError(f"{type(model).__name__} has no decoder blocks at {family.layers}")
    family = fitting(family, [layers[index] for index in held])
    block = layers[held[0]]
    num_heads = config.num_attention_heads
    return ModelPoints(
        model=model,
        family=family,
        layers=layers,
        local_layers=range(held[0], held[-1] + 1),
        final_norm=_optional_module(model, family.final_norm),
        project_out=_optional_module(model, family.project_out) if family.project_out else None,
        hidden_size=config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        # Sizes are read from the projections, since configs differ in which sizes they state and under which
        # names.
        head_dim=_input_size(block, family.leaves["attn.heads"]) // num_heads,
        intermediate_size=_input_size(block, family.leaves["mlp.act"]) if "mlp.act" in family.leaves else 0,
        vocab_size=config.vocab_size,
        tensor_parallel_size=tensor_parallel_size,
        num_experts=_output_size(block, family.leaves[ROUTER]) if ROUTER in family.leaves else 0,
        generates=generates,
    )


def fitting(family: EngineFamily, blocks: Sequence[nn.Module]) -> EngineFamily:
    """Return the table without ``moe.router`` if some of a model's blocks have no experts."""
    spec = family.leaves.get(ROUTER)
    if spec is None or all(spec.path in dict(block.named_modules()) for block in blocks):
        return family
    others = {leaf: place for leaf, place in family.leaves.items() if leaf != ROUTER}
    return dataclasses.replace(family, leaves=others)


def _served_class(model: nn.Module) -> type:
    """Return a model's class, without the subclass that vLLM makes of it to pool its hidden states."""
    return next(kind for kind in type(model).__mro__ if kind.__module__ != _POOLING_ADAPTERS)


def family_named(class_name: str, architectures: Sequence[str]) -> EngineFamily:
    """Return the table for a model.

    Args:
        class_name: Name of its class in vLLM.
        architectures: The ``architectures`` of its config.

    Raises:
        UnsupportedModelError: No table matches.
    """
    for family in FAMILIES:
        if class_name in family.model_classes and (
            not family.architectures or any(name in family.architectures for name in architectures)
        ):
            return family
    supported = [name for family in FAMILIES for name in family.architectures or family.model_classes]
    raise UnsupportedModelError(
        f"the architecture must be one of {', '.join(supported)}, "
        f"got {', '.join(architectures) or 'none'} (vLLM class {class_name}); serve another model, "
        "or drop --model-impl transformers if it was given"
    )


def _optional_module(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at ``path``, or None if the model sets the attribute to None."""
    parent, _, name = path.rpartition(".")
    module: nn.Module | None = getattr(model.get_submodule(parent), name)
    return module


def base_module(module: nn.Module) -> nn.Module:
    """Return the projection inside vLLM's wrapper for LoRA adapters, or the module itself."""
    base: nn.Module | None = getattr(module, "base_layer", None)
    return module if base is None else base


def _input_size(block: nn.Module, spec: HookSpec) -> int:
    """Return the whole-model input width of one of vLLM's linear layers."""
    return cast("_Linear", base_module(block.get_submodule(spec.path))).input_size


def _output_size(block: nn.Module, spec: HookSpec) -> int:
    """Return the whole-model output width of one of vLLM's linear layers."""
    return cast("_Linear", block.get_submodule(spec.path)).output_size


def _plain_forward(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Run ``forward`` of the module's class, without replacements and hooks of this instance."""
    result = type(module).forward(module, rows)
    return cast("torch.Tensor", result[0] if isinstance(result, tuple) else result)


def _split_last(rows: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Split the last axis into several; the result is a view, whatever the strides."""
    return rows.view(*rows.shape[:-1], *sizes)
