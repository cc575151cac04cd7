"""Phi-MoE, of whose unembedding vLLM 0.32 loads a bias and does not add it."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

_CLASS: Final = "PhiMoEForCausalLM"


def add_unembedding_bias(model: nn.Module) -> None:
    if type(model).__name__ == _CLASS:
        type(model).compute_logits = _compute_logits  # type: ignore[attr-defined]


def _compute_logits(model: Any, hidden_states: torch.Tensor) -> Any:
    return model.logits_processor(model.lm_head, hidden_states, model.lm_head.bias)
