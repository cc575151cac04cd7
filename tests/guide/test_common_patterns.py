"""Patching, logit lens, auxiliary modules, ablation, attention, steering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, save
from tests.guide.alone import module_of
from tests.guide.modules import SparseAutoencoder
from tests.guide.served import Load
from tests.hook_reference import edited, outputs_of

CLEAN = " the tower of Paris is"
CORRUPTED = " the tower of Rome is"


def test_activation_patching_gives_the_last_token_of_another_run(gpt2: LanguageModel) -> None:
    model = gpt2
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(CLEAN):
            clean_hs = model.transformer.h[2].output[:, -1, :]
            barrier()
        with tracer.invoke(CORRUPTED):
            barrier()
            model.transformer.h[2].output[:, -1, :] = clean_hs
            patched_logits = model.lm_head.output.save()

    def patched(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[1, -1] = hidden[0, -1]
        return hidden

    inputs = model.tokenizer([CLEAN, CORRUPTED], return_tensors="pt")
    (untouched,) = outputs_of(model._module, inputs, "lm_head")
    with edited(model._module, "transformer.h.2", patched):
        (expected,) = outputs_of(model._module, inputs, "lm_head")
    assert torch.equal(patched_logits, expected[1:])
    assert not torch.equal(patched_logits, untouched[1:])


def test_the_logit_lens_applies_the_head_to_every_layer(gpt2: LanguageModel) -> None:
    model = gpt2
    with model.trace(CLEAN):
        lens = save([])
        for i in range(4):
            hs = model.transformer.h[i].output
            lens.append(model.lm_head(model.transformer.ln_f(hs)))
        logits = model.lm_head.output.save()
    plain: Any = module_of(model)
    inputs = model.tokenizer(CLEAN, return_tensors="pt")
    layers = outputs_of(plain, inputs, *(f"transformer.h.{index}" for index in range(4)))
    for own, hidden in zip(lens, layers, strict=True):
        assert torch.equal(own, plain.lm_head(plain.transformer.ln_f(hidden)))
    assert torch.equal(lens[-1], logits)
    token = model.tokenizer.decode(lens[-1].argmax(dim=-1)[0][-1])
    assert token == model.tokenizer.decode(logits[0, -1].argmax())


def test_modules_called_in_a_block_are_not_the_models_own_calls(gpt2: LanguageModel) -> None:
    with gpt2.trace(CLEAN) as tracer:
        cache = tracer.cache(modules=[gpt2.lm_head])
        lens = gpt2.lm_head(gpt2.transformer.h[0].output)
        assert lens.shape[-1] == gpt2.config.vocab_size
        logits = gpt2.lm_head.output.save()
    inputs = gpt2.tokenizer(CLEAN, return_tensors="pt")
    assert torch.equal(logits, *outputs_of(gpt2._module, inputs, "lm_head"))
    assert torch.equal(cache["model.lm_head"].output, logits)  # one call, not a list of two


@pytest.fixture
def with_sae(gpt2_folder: Path, load: Load) -> LanguageModel:
    """A GPT-2 of its own, with a sparse autoencoder added."""
    model = load(gpt2_folder)
    model.sae = SparseAutoencoder(model.config.hidden_size, 16)
    return model


def test_an_auxiliary_module_is_read_by_another_invoke(with_sae: LanguageModel) -> None:
    model = with_sae
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            hidden = model.transformer.h[2].output
            reconstructed = model.sae(hidden, hook=True)
            model.transformer.h[2].output = reconstructed
            logits = model.lm_head.output.save()
        with tracer.invoke("Hello"):
            sae_activations = model.sae.output.save()
            untouched = model.lm_head.output.save()
    sae = model.sae._module
    inputs = model.tokenizer(["Hello", "Hello"], return_tensors="pt")

    def rebuilt(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([sae(hidden[:1]), hidden[1:]])

    (layer,) = outputs_of(model._module, inputs, "transformer.h.2")
    with edited(model._module, "transformer.h.2", rebuilt):
        (expected,) = outputs_of(model._module, inputs, "lm_head")
    assert torch.equal(sae_activations, sae(layer[:1]))
    assert torch.equal(logits, expected[:1])
    assert torch.equal(untouched, expected[1:])


def test_parts_of_an_auxiliary_module_are_read_and_edited(with_sae: LanguageModel) -> None:
    model = with_sae
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            model.transformer.h[2].output = model.sae(model.transformer.h[2].output, hook=True)
            result = model.transformer.h[2].output.save()
        with tracer.invoke():
            model.sae.encoder.output[:] = 1
    sae: Any = model.sae._module
    num_tokens = result.shape[1]
    assert torch.equal(result, sae.decoder(torch.ones(1, num_tokens, 16)))


def test_without_hook_an_auxiliary_module_is_only_computed(with_sae: LanguageModel) -> None:
    model = with_sae
    with (
        pytest.raises(ValueError, match=r"`model\.sae\.output\.i0` was not provided"),
        model.trace() as tracer,
    ):
        with tracer.invoke("Hello"):
            model.transformer.h[2].output = model.sae(model.transformer.h[2].output)
        with tracer.invoke():
            model.sae.output.save()


def test_ablation_is_compared_with_a_baseline_in_one_trace(gpt2: LanguageModel) -> None:
    model = gpt2
    with model.trace() as tracer:
        with tracer.invoke("Hello World"):
            baseline = model.lm_head.output[:, -1].save()
        with tracer.invoke("Hello World"):
            model.transformer.h[2].mlp.output[:] = 0
            ablated = model.lm_head.output[:, -1].save()

    def second_zeroed(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:1], torch.zeros_like(hidden[1:])])

    inputs = model.tokenizer(["Hello World", "Hello World"], return_tensors="pt")
    with edited(model._module, "transformer.h.2.mlp", second_zeroed):
        (expected,) = outputs_of(model._module, inputs, "lm_head")
    assert torch.equal(baseline, expected[:1, -1])
    assert torch.equal(ablated, expected[1:, -1])
    assert (baseline - ablated).abs().mean() > 0


def test_attention_weights_are_read_from_the_eager_function(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder, attn_implementation="eager", dispatch=True)
    with model.trace("Hello World"):
        attended, attn_weights = model.transformer.h[0].attn.source.attention_interface_0.output
        attended, attn_weights = attended.save(), attn_weights.save()
    inputs = model.tokenizer("Hello World", return_tensors="pt")
    (plain,) = outputs_of(model._module, inputs, "transformer.h.0.attn")
    assert torch.equal(attn_weights, plain[1])
    torch.testing.assert_close(attn_weights.sum(-1), torch.ones_like(attn_weights[..., 0]))
    assert attended.shape[1] == attn_weights.shape[-1]


def test_steering_adds_a_direction_to_the_last_token(gpt2: LanguageModel) -> None:
    steering_vector = torch.randn(gpt2.config.hidden_size)
    with gpt2.trace("Hello"):
        gpt2.transformer.h[2].output[:, -1, :] += steering_vector * 0.5
        output = gpt2.lm_head.output.save()

    def steered(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:, :-1], hidden[:, -1:] + steering_vector * 0.5], dim=1)

    inputs = gpt2.tokenizer("Hello", return_tensors="pt")
    with edited(gpt2._module, "transformer.h.2", steered):
        assert torch.equal(output, *outputs_of(gpt2._module, inputs, "lm_head"))


@pytest.mark.e2e
def test_the_lens_of_a_trained_model_finds_the_answer_in_late_layers(smollm: LanguageModel) -> None:
    prompt = "The Eiffel Tower is located in the city of"
    with torch.no_grad(), smollm.trace(prompt):
        tokens = save([])
        for layer in smollm.model.layers:
            logits = smollm.lm_head(smollm.model.norm(layer.output[:, -1]))
            tokens.append(smollm.tokenizer.decode(logits.argmax(dim=-1)[0]))
    assert tokens[-1] == " Paris"
    assert tokens[0] != " Paris"


@pytest.mark.e2e
def test_patching_a_trained_model_gives_it_the_other_answer(smollm: LanguageModel) -> None:
    france, italy = "The capital of France is the city of", "The capital of Italy is the city of"
    layer = smollm.model.layers[-2]
    with torch.no_grad(), smollm.session():
        with smollm.trace(france):
            hs = layer.output[:, -1, :]
        with smollm.trace(italy):
            clean = smollm.lm_head.output[0][-1].argmax(dim=-1).save()
        with smollm.trace(italy):
            layer.output[:, -1, :] = hs
            patched = smollm.lm_head.output[0][-1].argmax(dim=-1).save()
    assert smollm.tokenizer.decode(clean) == " Rome"
    assert smollm.tokenizer.decode(patched) == " Paris"
