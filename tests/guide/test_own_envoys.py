"""Envoy classes of one's own for some modules, attention heads as a list."""

# Views are defined as the guide does, by the name of the stub, as a setter is.
# mypy: disable-error-code="no-redef"

from __future__ import annotations

from typing import Any

import pytest
import torch
from nnsight_engine.intervention.envoy import Envoy, eproperty
from nnsight_engine.intervention.hooks import requires_output
from transformers.models.llama.modeling_llama import LlamaAttention

from nnsight_engine import LanguageModel, NNsight
from tests.guide.attention import HEAD_WIDTH, NUM_HEADS, WIDTH, Attender, Attention
from tests.hook_reference import edited, outputs_of


class AttnEnvoy(Envoy):
    """Exposes attention output as a list of per-head ``[num_rows, num_tokens, head_width]`` views."""

    @eproperty(key="output")
    @requires_output
    def heads(self) -> Any:
        """Per-head views of the attention output. Mutate in place to edit a head."""

    @heads.preprocess
    def heads(self, value: Any) -> Any:
        n_heads = self._module.n_heads
        rows, tokens, width = value.shape
        return list(value.view(rows, tokens, n_heads, width // n_heads).unbind(dim=2))

    def zero(self, head: int) -> None:
        """Zero a head: a method is found on the envoy like a property."""
        self.heads[head][:] = 0


class LinearEnvoy(Envoy):
    """Stands for layers."""


@pytest.fixture
def rows() -> torch.Tensor:
    """Two rows of three tokens."""
    return torch.linspace(-1, 1, 2 * 3 * WIDTH).reshape(2, 3, WIDTH)


def without_head(head: int) -> Any:
    """Return an edit that zeroes a head."""

    def zeroed(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, :, head * HEAD_WIDTH : (head + 1) * HEAD_WIDTH] = 0
        return value

    return zeroed


def test_a_head_is_zeroed_in_place_on_the_models_tensor(rows: torch.Tensor) -> None:
    model = NNsight(Attender(), envoys={Attention: AttnEnvoy})
    with model.trace(rows):
        heads = model.layers[1].self_attn.heads.save()
        heads[3][:] = 0
        out = model.output.save()
    with edited(model._module, "layers.1.self_attn", without_head(3)):
        assert torch.equal(out, model._module(rows))
    (attended,) = outputs_of(model._module, {"x": rows}, "layers.1.self_attn")
    assert len(heads) == NUM_HEADS
    assert torch.equal(heads[0], attended[..., :HEAD_WIDTH])
    assert not heads[3].any()


def test_each_invoke_has_heads_of_its_own_rows(gpt2: LanguageModel) -> None:
    class Gpt2Attention(Envoy):
        @eproperty(key="output")
        @requires_output
        def heads(self) -> Any:
            """Views of the attention output."""

        @heads.preprocess
        def heads(self, value: Any) -> Any:
            return value[0].unflatten(2, (self.num_heads, -1)).unbind(dim=2)

    model = LanguageModel(
        gpt2._module,
        tokenizer=gpt2.tokenizer,
        envoys={type(gpt2.transformer.h[0].attn._module): Gpt2Attention},
    )
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            model.transformer.h[1].attn.heads[0][:] = 0
            edited_logits = model.lm_head.output.save()
        with tracer.invoke("World"):
            untouched_logits = model.lm_head.output.save()
    width = gpt2.config.hidden_size // gpt2.config.num_attention_heads

    def first_row_without_first_head(value: tuple[Any, ...]) -> tuple[Any, ...]:
        attended = value[0].clone()
        attended[0, :, :width] = 0
        return (attended, *value[1:])

    inputs = gpt2.tokenizer(["Hello", "World"], return_tensors="pt")
    with edited(gpt2._module, "transformer.h.1.attn", first_row_without_first_head):
        (expected,) = outputs_of(gpt2._module, inputs, "lm_head")
    assert torch.equal(torch.cat([edited_logits, untouched_logits]), expected)


def test_a_method_of_an_envoy_is_called_in_a_block(rows: torch.Tensor) -> None:
    model = NNsight(Attender(), envoys={Attention: AttnEnvoy})
    with model.trace(rows):
        model.layers[0].self_attn.zero(1)
        out = model.output.save()
    with edited(model._module, "layers.0.self_attn", without_head(1)):
        assert torch.equal(out, model._module(rows))


def test_without_envoys_all_descendants_are_plain() -> None:
    model = NNsight(Attender())
    assert {type(envoy) for envoy in model.modules() if envoy is not model} == {Envoy}


def test_one_class_stands_for_all_descendants() -> None:
    model = NNsight(Attender(), envoys=LinearEnvoy)
    assert {type(envoy) for envoy in model.modules() if envoy is not model} == {LinearEnvoy}


def test_a_mapping_goes_by_the_modules_class_and_falls_back_to_envoy() -> None:
    model = NNsight(Attender(), envoys={Attention: AttnEnvoy, torch.nn.Linear: LinearEnvoy})
    assert type(model.layers[0].self_attn) is AttnEnvoy
    assert type(model.layers[1].self_attn) is AttnEnvoy
    assert type(model.layers[0].self_attn.qkv) is LinearEnvoy
    assert type(model.head) is LinearEnvoy
    assert type(model.layers) is Envoy
    assert type(model.norm) is Envoy


def test_a_mapping_finds_a_module_by_its_base_classes_nearest_first() -> None:
    class Special(torch.nn.Linear):
        pass

    net = torch.nn.Sequential(Special(2, 2), torch.nn.ReLU())
    by_base = NNsight(net, envoys={torch.nn.Module: Envoy, torch.nn.Linear: LinearEnvoy})
    assert type(by_base[0]) is LinearEnvoy
    by_own = NNsight(net, envoys={torch.nn.Linear: LinearEnvoy, Special: AttnEnvoy})
    assert type(by_own[0]) is AttnEnvoy


def test_envoys_are_for_transformers_own_classes_too(llama: LanguageModel) -> None:
    model = LanguageModel(llama._module, tokenizer=llama.tokenizer, envoys={LlamaAttention: AttnEnvoy})
    assert all(type(layer.self_attn) is AttnEnvoy for layer in model.model.layers)


def test_the_docstring_is_there_for_help() -> None:
    assert (
        AttnEnvoy.heads.__doc__ == "Per-head views of the attention output. Mutate in place to edit a head."
    )
    assert "heads" in dir(NNsight(Attender(), envoys={Attention: AttnEnvoy}).layers[0].self_attn)
