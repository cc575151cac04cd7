"""A value in place of a module's run."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight
from nnsight_engine.interleaving.events import MissedProviderError, OutOfOrderError
from tests.guide.alone import module_of, tokens
from tests.guide.modules import TinyMLP
from tests.hook_reference import edited, outputs_of
from tests.small_models import Rows


def test_a_skipped_layer_hands_on_what_the_layer_before_gave(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        layer0_out = gpt2.transformer.h[0].output
        gpt2.transformer.h[1].skip(layer0_out)
        skipped = gpt2.transformer.h[1].output.save()
        result = gpt2.output.save()

    (before,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    with edited(gpt2._module, "transformer.h.1", lambda _: before):
        expected = module_of(gpt2)(**tokens(gpt2, "Hello"))
    assert torch.equal(skipped, before)
    assert torch.equal(result.logits, expected.logits)


def test_a_skipped_module_does_not_run_and_its_output_can_be_edited(
    tiny: NNsight, features: torch.Tensor
) -> None:
    ran: list[str] = []
    tiny.layer1._module.register_forward_pre_hook(lambda *_: ran.append("layer1"))
    tiny.layer2._module.register_forward_pre_hook(lambda *_: ran.append("layer2"))
    with tiny.trace(features):
        tiny.layer1.skip(torch.ones(1, 10))
        tiny.layer1.output = tiny.layer1.output * 2
        out = tiny.output.save()
    assert ran == ["layer2"]
    assert torch.equal(out, tiny.layer2._module(torch.ones(1, 10) * 2))


def test_nothing_can_be_read_inside_a_skipped_module(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(MissedProviderError, match=r"model\.transformer\.h\.1\.mlp\.output\.i0"),
        gpt2.trace("Hello"),
    ):
        gpt2.transformer.h[1].skip(gpt2.transformer.h[0].output)
        gpt2.transformer.h[1].mlp.output.save()


def test_a_module_that_has_run_cannot_be_skipped(gpt2: LanguageModel) -> None:
    with pytest.raises(OutOfOrderError, match=r"model\.transformer\.h\.1"), gpt2.trace("Hello"):
        hidden = gpt2.transformer.h[2].output
        gpt2.transformer.h[1].skip(hidden)


def test_every_invoke_may_skip_with_its_own_value(gpt2: LanguageModel) -> None:
    first, second = torch.zeros(1, 5, 128), torch.ones(1, 5, 128)
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            gpt2.transformer.h[1].skip(first)
            out1 = gpt2.lm_head.output.save()
        with tracer.invoke("World"):
            gpt2.transformer.h[1].skip(second)
            out2 = gpt2.lm_head.output.save()
    with edited(gpt2._module, "transformer.h.1", lambda _: torch.cat([first, second])):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "lm_head")
    assert torch.equal(torch.cat([out1, out2]), expected)


def test_an_empty_invoke_skips_for_all(features: torch.Tensor) -> None:
    model = Rows(TinyMLP())
    with model.trace() as tracer:
        with tracer.invoke(features):
            first = model.output.save()
        with tracer.invoke(torch.cat([features, features])):
            second = model.output.save()
        with tracer.invoke():
            model.layer1.skip(torch.ones(3, 10))
    expected = TinyMLP().layer2(torch.ones(3, 10))
    assert torch.equal(torch.cat([first, second]), expected)


def test_a_module_skipped_in_some_invokes_only_is_an_error(gpt2: LanguageModel) -> None:
    with pytest.raises(ValueError, match="skipped in 1 of 2 invokes"), gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            gpt2.transformer.h[1].skip(torch.zeros(1, 5, 128))
        with tracer.invoke("World"):
            gpt2.lm_head.output.save()
