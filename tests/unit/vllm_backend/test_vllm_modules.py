"""What is made of single modules of vLLM: attention, mixers and quantised layers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from vllm import EngineArgs
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.families.dense import LLAMA, LLAMA_LEAVES
from nnsight_engine.families.layout import Place
from nnsight_engine.modeling.bundled import bundled_model_path
from nnsight_engine.vllm_backend.hooks import attention_form, keep_inputs_plain
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.module_tree import BlockPoints


def test_attention_patterns_are_computed_as_vllm_attends_or_refused() -> None:
    config = EngineArgs(str(bundled_model_path()), enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        attention: Any = Attention(
            2,
            32,
            0.5,
            logits_soft_cap=30.0,
            alibi_slopes=[0.5, 0.25],
            per_layer_sliding_window=8,
            attn_backend=CPUAttentionBackend,
        )
    form = attention_form(attention)
    assert (form.scale, form.soft_cap, form.window) == (0.5, 30.0, 8)
    assert form.slopes is not None
    assert form.slopes.tolist() == [0.5, 0.25]
    for name in ("has_sink", "use_alibi_sqrt"):
        setattr(attention, name, True)
        with pytest.raises(InterventionError, match="has sinks, or roots of distances"):
            attention_form(attention)
        setattr(attention, name, False)
    del attention.impl.logits_soft_cap
    with pytest.raises(InterventionError, match="does not expose logits_soft_cap"):
        attention_form(attention)


def test_there_is_no_pattern_where_positions_attend_to_later_ones() -> None:
    causal = BlockPoints(LLAMA_LEAVES, LLAMA.kernel, num_heads=2, num_kv_heads=1, head_dim=4)
    shapes, others = causal.shapes(8), dataclasses.replace(causal, is_causal=False).shapes(8)
    assert shapes.keys() - others.keys() == {"attn.pattern"}


class Projection(LinearBase):
    """A projection that takes activations which were quantised before; it has no weights."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._input_quant_key = kFp8StaticTensorSym


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = Projection()
        uncompiled = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
        with set_current_vllm_config(uncompiled):
            self.act_fn = SiluAndMul()


@dataclasses.dataclass
class Points:
    layers: tuple[nn.Module, ...]
    layout: SimpleNamespace
    local_layers: range = range(1)


def test_a_point_before_a_quantised_layer_is_a_plain_tensor() -> None:
    block = Block()
    leaves = {"mlp.act": Place("down_proj", "input"), "mlp.output": Place("down_proj", "output")}
    points = Points((block,), SimpleNamespace(blocks=(BlockPoints(leaves),)))
    keep_inputs_plain(cast("ModelPoints", points))
    rows = torch.randn(3, 32)
    gate, up = rows.chunk(2, dim=-1)
    activations: Any = maybe_fused_act_quant(block.act_fn, rows, block.down_proj)
    torch.testing.assert_close(activations, nn.functional.silu(gate) * up)
