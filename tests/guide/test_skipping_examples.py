"""Modules skipped: a value in place of their computation."""

from __future__ import annotations

import pytest
import torch
from nnsight_engine.intervention.interleaver import MissedProviderError, OutOfOrderError

from nnsight_engine import LanguageModel
from tests.guide.alone import module_of
from tests.hook_reference import edited, outputs_of

TEXT = "Hello"


def test_a_skipped_module_gives_the_value_and_does_not_run(gpt2: LanguageModel) -> None:
    ran: list[str] = []
    hook = gpt2._module.get_submodule("transformer.h.1.mlp").register_forward_hook(
        lambda *_: ran.append("mlp")
    )
    with gpt2.trace(TEXT):
        layer0_out = gpt2.transformer.h[0].output.save()
        gpt2.transformer.h[1].skip(layer0_out)
        layer1_out = gpt2.transformer.h[1].output.save()
        logits = gpt2.lm_head.output.save()
    hook.remove()
    assert ran == []
    assert torch.equal(layer0_out, layer1_out)
    plain, inputs = module_of(gpt2), gpt2.tokenizer(TEXT, return_tensors="pt")
    (expected_0,) = outputs_of(plain, inputs, "transformer.h.0")
    with edited(plain, "transformer.h.1", lambda _: expected_0):
        (expected,) = outputs_of(plain, inputs, "lm_head")
    assert torch.equal(layer0_out, expected_0)
    assert torch.equal(logits, expected)


def test_nothing_can_be_read_inside_a_skipped_module(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(MissedProviderError, match=r"model\.transformer\.h\.1\.mlp\.output\.i0"),
        gpt2.trace(TEXT),
    ):
        gpt2.transformer.h[1].skip(gpt2.transformer.h[0].output)
        gpt2.transformer.h[1].mlp.output.save()


def test_a_module_that_has_run_cannot_be_skipped(gpt2: LanguageModel) -> None:
    with pytest.raises(OutOfOrderError, match=r"model\.transformer\.h\.1"), gpt2.trace(TEXT):
        hidden = gpt2.transformer.h[2].output
        gpt2.transformer.h[1].skip(hidden)


def test_every_invoke_skips_a_module_for_its_own_rows(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            gpt2.transformer.h[1].skip(gpt2.transformer.h[0].output)
            first = gpt2.transformer.h[1].output.save()
        with tracer.invoke("World"):
            gpt2.transformer.h[1].skip(gpt2.transformer.h[0].output * 2)
            second = gpt2.transformer.h[1].output.save()
    inputs = gpt2.tokenizer(["Hello", "World"], return_tensors="pt")
    (layer0,) = outputs_of(gpt2._module, inputs, "transformer.h.0")
    assert torch.equal(first, layer0[:1])
    assert torch.equal(second, layer0[1:] * 2)
