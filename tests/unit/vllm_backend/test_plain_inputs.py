"""A point that is the input of a linear layer is a plain tensor, also where vLLM could quantise it before."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

from nnsight_engine.families.places import Place
from nnsight_engine.vllm_backend.hooks import keep_inputs_plain
from nnsight_engine.vllm_backend.model_layout import BlockPoints
from nnsight_engine.vllm_backend.model_points import ModelPoints


class _Projection(LinearBase):
    """A projection that takes activations which were quantised before; it has no weights."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._input_quant_key = kFp8StaticTensorSym


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = _Projection()
        with set_current_vllm_config(VllmConfig()):
            self.act_fn = SiluAndMul()

    def activations(self, rows: torch.Tensor) -> Any:
        return maybe_fused_act_quant(self.act_fn, rows, self.down_proj)


@dataclasses.dataclass
class _Layout:
    blocks: tuple[BlockPoints, ...]


@dataclasses.dataclass
class _Points:
    layers: tuple[nn.Module, ...]
    layout: _Layout
    local_layers: range = range(1)


def test_activations_of_quantised_layers_are_plain_tensors() -> None:
    block = _Block()
    leaves = {"mlp.act": Place("down_proj", "input"), "mlp.output": Place("down_proj", "output")}
    points = _Points((block,), _Layout((BlockPoints(leaves),)))
    keep_inputs_plain(cast("ModelPoints", points))
    rows = torch.randn(3, 32)
    gate, up = rows.chunk(2, dim=-1)
    torch.testing.assert_close(block.activations(rows), nn.functional.silu(gate) * up)
