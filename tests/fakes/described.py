"""The description of the fake engine's model, for which clients can write blocks."""

from __future__ import annotations

from typing import Final

from app.engine.client import DescribedModel
from tests.fakes.model_specs import tiny_spec
from tests.fakes.results import CAPABILITIES, MODEL

_SIZES: Final = CAPABILITIES.sizes
_SPEC: Final = tiny_spec(
    name=MODEL,
    architecture=CAPABILITIES.architecture,
    num_layers=_SIZES.num_layers,
    hidden_size=_SIZES.hidden_size,
    vocab_size=_SIZES.vocab_size,
    max_model_len=_SIZES.max_model_len,
    max_num_batched_tokens=_SIZES.max_model_len,
)
DESCRIPTION: Final = DescribedModel(
    [
        ("", CAPABILITIES.architecture, "", ""),
        ("model", "LlamaModel", "", ""),
        ("model.layers", "ModuleList", "", ""),
        *((f"model.layers.{layer}", "LlamaDecoderLayer", "", "") for layer in range(_SIZES.num_layers)),
    ],
    _SPEC.to_plain(),
)
