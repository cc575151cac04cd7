"""The description of a small Llama, with all of its points, as a worker gives it."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from nnsight_engine.core.model_spec import PATTERN, LeafSpec, ModelSpec
from nnsight_engine.families.dense import LLAMA
from nnsight_engine.families.layout import Place
from nnsight_engine.vllm_backend.module_tree import BlockPoints, ModelLayout

VALUE_OPERATIONS: Final = ("steer", "ablate", "patch", "capture", "probe")


def tiny_spec(
    *extra: LeafSpec, num_heads: int = 2, num_kv_heads: int = 2, layout: ModelLayout | None = None,
    **changes: Any,
) -> ModelSpec:  # fmt: skip
    """Return a model's description; its leaves and its layout follow from its sizes.

    Args:
        extra: Leaves that a Llama lacks.
        num_heads: Query heads; they divide ``hidden_size``.
        num_kv_heads: Key and value heads.
        layout: The layout of another model.
        changes: Other fields of ``ModelSpec``.
    """
    spec = dataclasses.replace(_TINY, **changes)
    layout = layout or ModelLayout(LLAMA, (_block(spec, num_heads, num_kv_heads),) * spec.num_layers)
    hidden, logits = (spec.hidden_size,), (spec.vocab_size,)
    leaves = (
        LeafSpec("embed.output", hidden, "tap", VALUE_OPERATIONS),
        LeafSpec("input", hidden, "tap", VALUE_OPERATIONS),
        LeafSpec("output", hidden, "tap", (*VALUE_OPERATIONS, "logit_lens")),
        *(
            LeafSpec(name, shape, "eager", ("capture",) if name == PATTERN else VALUE_OPERATIONS)
            for name, shape in layout.blocks[0].shapes(spec.hidden_size).items()
        ),
        LeafSpec("norm.output", hidden, "tap", VALUE_OPERATIONS),
        LeafSpec("logits", logits, "tap", VALUE_OPERATIONS),
        LeafSpec("samples", (), "tap", ("capture",)),
    )
    return dataclasses.replace(spec, leaves=(*leaves, *extra), layout=layout.to_plain())


_TINY = ModelSpec(
    name="tiny",
    architecture="LlamaForCausalLM",
    num_layers=4,
    hidden_size=8,
    vocab_size=100,
    dtype="float32",
    max_model_len=64,
    max_num_batched_tokens=32,
    leaves=(),
    max_capture_bytes=1 << 20,
)


def _block(spec: ModelSpec, num_heads: int, num_kv_heads: int) -> BlockPoints:
    return BlockPoints(
        leaves={name: place for name, place in LLAMA.leaves.items() if isinstance(place, Place)},
        kernel=LLAMA.kernel,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=spec.hidden_size // num_heads,
        inner_size=2 * spec.hidden_size,
    )
