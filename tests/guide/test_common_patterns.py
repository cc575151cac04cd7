"""Logit lens, patching, auxiliary modules, ablation, attention, steering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight, save
from tests.guide.alone import module_of, tokens
from tests.guide.modules import SparseAutoencoder, TinyMLP
from tests.guide.served import Load
from tests.hook_reference import edited, outputs_of

PATHS = [f"transformer.h.{layer}" for layer in range(4)]


def test_the_logit_lens_applies_the_head_to_every_layer(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache(modules=[gpt2.lm_head])
        lens = save([])
        for block in gpt2.transformer.h:
            lens.append(gpt2.lm_head(gpt2.transformer.ln_f(block.output)))
        logits = gpt2.lm_head.output.save()  # the model's own call, none of those above
    *layers, expected = outputs_of(gpt2._module, tokens(gpt2, "Hello"), *PATHS, "lm_head")
    head, norm = module_of(gpt2.lm_head), module_of(gpt2.transformer.ln_f)
    assert len(lens) == 4
    assert all(map(torch.equal, lens, [head(norm(hidden)) for hidden in layers]))
    assert torch.equal(lens[-1], expected)
    assert torch.equal(logits, expected)
    assert torch.equal(cache["model.lm_head"].output, expected)  # one call, not a list


@pytest.mark.e2e
def test_the_lens_of_a_trained_model_finds_the_answer_in_late_layers(smollm: LanguageModel) -> None:
    with torch.no_grad(), smollm.trace("The Eiffel Tower is located in the city of"):
        words = save([])
        for layer in smollm.model.layers:
            logits = smollm.lm_head(smollm.model.norm(layer.output[:, -1]))
            words.append(smollm.tokenizer.decode(logits.argmax(dim=-1)[0]))
    assert words[-1] == " Paris"
    assert words[0] != " Paris"


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


def test_ablation_is_compared_with_a_baseline_in_one_trace(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            baseline = gpt2.lm_head.output[:, -1].save()
        with tracer.invoke("Hello"):
            gpt2.transformer.h[2].mlp.output[:] = 0
            ablated = gpt2.lm_head.output[:, -1].save()

    def second_zeroed(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:1], torch.zeros_like(hidden[1:])])

    with edited(gpt2._module, "transformer.h.2.mlp", second_zeroed):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "Hello"), "lm_head")
    assert torch.equal(torch.cat([baseline, ablated]), expected[:, -1])
    assert not torch.equal(baseline, ablated)


def test_attention_weights_are_read_from_the_eager_function(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder, attn_implementation="eager", dispatch=True)
    with model.trace("Hello World"):
        attended, attn_weights = model.transformer.h[0].attn.source.attention_interface_0.output
        attended, attn_weights = attended.save(), attn_weights.save()
    (plain,) = outputs_of(model._module, tokens(model, "Hello World"), "transformer.h.0.attn")
    assert torch.equal(attn_weights, plain[1])
    torch.testing.assert_close(attn_weights.sum(-1), torch.ones_like(attn_weights[..., 0]))
    assert attended.shape[1] == attn_weights.shape[-1]


def test_a_direction_steers_and_a_probe_reads(gpt2: LanguageModel) -> None:
    direction, probe = torch.randn(gpt2.config.hidden_size), torch.nn.Linear(128, 2)
    with gpt2.trace("Hello"):
        gpt2.transformer.h[2].output[:, -1, :] += direction * 0.5
        scores = probe(gpt2.transformer.h[2].output[:, -1]).save()
        logits = gpt2.lm_head.output.save()

    def steered(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:, :-1], hidden[:, -1:] + direction * 0.5], dim=1)

    (hidden,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.2")
    with edited(gpt2._module, "transformer.h.2", steered):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "lm_head")
    assert torch.equal(scores, probe(steered(hidden)[:, -1]))
    assert torch.equal(logits, expected)


# Auxiliary modules.


@pytest.fixture
def with_sae(gpt2_folder: Path, load: Load) -> LanguageModel:
    """A GPT-2 of its own, with a sparse autoencoder added."""
    model = load(gpt2_folder)
    model.sae = SparseAutoencoder(128, 16)
    return model


def test_an_auxiliary_module_is_read_by_other_invokes(with_sae: LanguageModel) -> None:
    model = with_sae
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            hidden = model.transformer.h[2].output
            model.transformer.h[2].output = model.sae(hidden, hook=True)
            logits = model.lm_head.output.save()
        with tracer.invoke("Hello"):
            # The value belongs to one row of two, so this invoke sees it whole.
            rebuilt = model.sae.output.save()
            untouched = model.lm_head.output.save()
        with tracer.invoke():
            given = model.sae.input.save()
            features = model.sae.encoder.output.save()
    sae, ids = SparseAutoencoder(128, 16), tokens(model, "Hello", "Hello")
    (layer,) = outputs_of(model._module, ids, "transformer.h.2")
    with edited(model._module, "transformer.h.2", lambda rows: torch.cat([sae(rows[:1]), rows[1:]])):
        (expected,) = outputs_of(model._module, ids, "lm_head")
    assert torch.equal(rebuilt, sae(layer[:1]))
    assert torch.equal(given, layer[:1])
    assert torch.equal(features, sae.encoder(layer[:1]))
    assert torch.equal(torch.cat([logits, untouched]), expected)


def test_parts_of_an_auxiliary_module_are_edited(with_sae: LanguageModel) -> None:
    model = with_sae
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            model.transformer.h[2].output = model.sae(model.transformer.h[2].output, hook=True)
            result = model.transformer.h[2].output.save()
        with tracer.invoke():
            model.sae.encoder.output[:] = 1
    assert torch.equal(result, SparseAutoencoder(128, 16).decoder(torch.ones(1, 5, 16)))


def test_without_hook_and_outside_of_a_trace_a_call_is_the_modules_own(
    tiny: NNsight, features: torch.Tensor
) -> None:
    tiny.sae = SparseAutoencoder(10, 16)
    message = r"`model\.sae\.output\.i0` was not provided"
    with pytest.raises(ValueError, match=message), tiny.trace() as tracer:
        with tracer.invoke(features):
            tiny.layer1.output = tiny.sae(tiny.layer1.output)
        with tracer.invoke():
            tiny.sae.output.save()
    plain: Any = TinyMLP()
    assert torch.equal(tiny(features), plain(features))
    assert torch.equal(tiny.layer1(features), plain.layer1(features))
