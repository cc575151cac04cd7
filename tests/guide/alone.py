"""What transformers computes by itself from the same text; traces of language models are compared with it."""

from __future__ import annotations

from typing import Any

import torch

from nnsight_engine import Envoy, LanguageModel
from tests.hook_reference import with_weights


def tokens(model: LanguageModel, *texts: str) -> dict[str, torch.Tensor]:
    """Tokenize texts of one length."""
    return dict(model.tokenizer(list(texts), return_tensors="pt"))


def module_of(model: Envoy) -> Any:
    """Return transformers' own model or a part of it, with its weights wherever its traces run."""
    return with_weights(model._module)


def generated(model: LanguageModel, text: str, **options: Any) -> torch.Tensor:
    """Return the prompt and what follows it, ``[1, num_tokens]``."""
    module = module_of(model)
    result: torch.Tensor = module.generate(**tokens(model, text), pad_token_id=0, **options)
    return result
