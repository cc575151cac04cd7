"""Modules called on values of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight, save
from tests.guide.alone import module_of, tokens
from tests.guide.modules import SparseAutoencoder, TinyMLP
from tests.guide.served import Load
from tests.hook_reference import edited, outputs_of


def test_logit_lens_of_the_last_layer_is_what_the_model_predicts(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hidden_states = gpt2.transformer.h[-1].output
        logits = gpt2.lm_head(gpt2.transformer.ln_f(hidden_states)).save()
        predicted = logits.argmax(dim=-1).save()
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "lm_head")
    assert torch.equal(logits, expected)
    assert torch.equal(predicted, expected.argmax(dim=-1))
    assert gpt2.tokenizer.decode(predicted[0]) == gpt2.tokenizer.decode(expected.argmax(dim=-1)[0])


def test_logit_lens_of_every_layer(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        lens = save([])
        for block in gpt2.transformer.h:
            lens.append(gpt2.lm_head(gpt2.transformer.ln_f(block.output)))
    layers = outputs_of(
        gpt2._module, tokens(gpt2, "Hello"), *(f"transformer.h.{layer}" for layer in range(4))
    )
    head, norm = module_of(gpt2.lm_head), module_of(gpt2.transformer.ln_f)
    assert all(map(torch.equal, lens, [head(norm(hidden)) for hidden in layers]))


@pytest.mark.e2e
def test_logit_lens_of_a_real_model_finds_the_answer(smollm: LanguageModel) -> None:
    with smollm.trace("The capital of France is"):
        hidden = smollm.model.layers[-1].output
        guess = smollm.lm_head(smollm.model.norm(hidden))[0, -1].argmax().save()
        predicted = smollm.lm_head.output[0, -1].argmax().save()
    assert torch.equal(guess, predicted)
    assert smollm.tokenizer.decode(guess) == " Paris"


def test_a_call_bypasses_the_hooks(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        early = gpt2.lm_head(gpt2.transformer.ln_f(gpt2.transformer.h[0].output)).save()
        own = gpt2.lm_head.output.save()  # the model's own call, not the one above
    hidden, expected = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0", "lm_head")
    assert torch.equal(own, expected)
    assert torch.equal(early, module_of(gpt2.lm_head)(module_of(gpt2.transformer.ln_f)(hidden)))


def test_a_probe_is_applied_in_the_trace(gpt2: LanguageModel) -> None:
    torch.manual_seed(0)
    probe = torch.nn.Linear(128, 2)
    with gpt2.trace("Hello"):
        scores = probe(gpt2.transformer.h[2].output[:, -1]).save()
    (hidden,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.2")
    assert torch.equal(scores, probe(hidden[:, -1]))


def test_hook_true_lets_other_invokes_see_an_auxiliary_module(
    gpt2: LanguageModel, gpt2_folder: Path, load: Load
) -> None:
    model = load(gpt2_folder)
    model.sae = SparseAutoencoder(128, 32)
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            hidden = model.transformer.h[2].output
            model.transformer.h[2].output = model.sae(hidden, hook=True)
            logits = model.lm_head.output.save()
        with tracer.invoke():
            given = model.sae.input.save()
            features = model.sae.encoder.output.save()
            rebuilt = model.sae.output.save()

    sae = SparseAutoencoder(128, 32)
    (before,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.2")
    with edited(gpt2._module, "transformer.h.2", sae):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "lm_head")
    assert torch.equal(given, before)
    assert torch.equal(features, sae.encoder(before))
    assert torch.equal(rebuilt, sae(before))
    assert torch.equal(logits, expected)


def test_an_invoke_with_an_input_sees_an_auxiliary_module_run_by_another(
    gpt2: LanguageModel, gpt2_folder: Path, load: Load
) -> None:
    # As the document shows it: the value belongs to one row of two, so the other invoke sees it whole.
    model = load(gpt2_folder)
    model.sae = SparseAutoencoder(128, 32)
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            hidden = model.transformer.h[2].output
            model.transformer.h[2].output = model.sae(hidden, hook=True)
        with tracer.invoke("Hello"):
            sae_activations = model.sae.output.save()
    (before,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "Hello"), "transformer.h.2")
    assert torch.equal(sae_activations, SparseAutoencoder(128, 32)(before[:1]))


def test_without_hook_an_auxiliary_module_is_not_seen(tiny: NNsight, features: torch.Tensor) -> None:
    tiny.sae = SparseAutoencoder(10, 16)
    with (
        pytest.raises(ValueError, match=r"`model\.sae\.output\.i0` was not provided"),
        tiny.trace() as tracer,
    ):
        with tracer.invoke(features):
            tiny.layer1.output = tiny.sae(tiny.layer1.output)
        with tracer.invoke():
            tiny.sae.output.save()


def test_outside_of_a_trace_an_envoy_is_called_like_its_module(tiny: NNsight, features: torch.Tensor) -> None:
    assert torch.equal(tiny(features), TinyMLP()(features))
    assert torch.equal(tiny.layer1(features), TinyMLP().layer1(features))
