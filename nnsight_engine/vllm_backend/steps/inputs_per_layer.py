"""Gemma 3n of text alone (``Gemma3nForCausalLM``), whose embeddings per layer vLLM 0.32 leaves out."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

_CLASS: Final = "Gemma3nForCausalLM"
_GIVEN: Final = "per_layer_inputs"


def supply_inputs_per_layer(model: nn.Module, max_num_tokens: int) -> None:
    """Have it compute them in each step, in memory that stays, as CUDA graphs need; others stay as is."""
    if type(model).__name__ != _CLASS:
        return
    decoder: Any = model.model
    config, weight = decoder.config, decoder.embed_tokens.weight
    sizes = (config.num_hidden_layers, config.hidden_size_per_layer_input)
    kept = torch.zeros(max_num_tokens, *sizes, dtype=weight.dtype, device=weight.device)
    forward = model.forward

    def forward_with_inputs(input_ids: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if input_ids is not None and kwargs.get(_GIVEN) is None:
            inputs = kept[: len(input_ids)]
            inputs.copy_(decoder.get_per_layer_input_embeddings(input_ids).view_as(inputs))
            kwargs[_GIVEN] = inputs
        return forward(input_ids, *args, **kwargs)

    model.forward = forward_with_inputs
