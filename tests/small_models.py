"""Small models: one whose invokes take rows, and transformers of two layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from nnsight_engine import NNsight


class Rows(NNsight):
    """Takes tensors of any number of rows, one for each invoke."""

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        return inputs, kwargs, len(inputs[0]) if inputs else 0

    def _batch(
        self, batched_input: tuple[tuple[Any, ...], dict[str, Any]], *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.cat([batched_input[0][0], inputs[0]]),), kwargs


def tiny_gpt2() -> GPT2LMHeadModel:
    """Return a GPT-2 of two layers."""
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8)).eval()


def tiny_llama() -> LlamaForCausalLM:
    """Return a Llama of two layers."""
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        hidden_size=8,
        intermediate_size=16,
        vocab_size=16,
    )
    return LlamaForCausalLM(config).eval()
