"""The fake engine with the description of a small Llama, so that clients can write blocks for it."""

from __future__ import annotations

from typing import Final

from app.engine.client import DescribedModel
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.families.dense import LLAMA
from nnsight_engine.vllm_backend.model_layout import BlockPoints, ModelLayout
from tests.fakes.engine import FakeEngineClient
from tests.fakes.results import CAPABILITIES, MODEL

_SIZES: Final = CAPABILITIES.sizes
_LEAVES: Final = tuple(LeafSpec(name, (_SIZES.hidden_size,), "tap", ()) for name in ("input", "output"))
_SPEC: Final = ModelSpec(
    MODEL, "LlamaForCausalLM", _SIZES.num_layers, _SIZES.hidden_size, _SIZES.vocab_size, "float32",
    _SIZES.max_model_len, _SIZES.max_model_len, _LEAVES, 1,
    layout=ModelLayout(LLAMA, (BlockPoints({}, LLAMA.kernel),) * _SIZES.num_layers).to_plain(),
)  # fmt: skip


class DescribedEngineClient(FakeEngineClient):
    """A fake engine whose model has an architecture that is known."""

    async def describe_model(self) -> DescribedModel:
        """Return the modules and the points of the small Llama."""
        layers = [
            (f"model.layers.{layer}", "LlamaDecoderLayer", "", "") for layer in range(_SIZES.num_layers)
        ]
        modules = [
            ("", "LlamaForCausalLM", "", ""), ("model", "LlamaModel", "", ""),
            ("model.layers", "ModuleList", "", ""), *layers,
        ]  # fmt: skip
        return DescribedModel(modules, _SPEC.to_plain())
