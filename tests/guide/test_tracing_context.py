"""What `trace` takes and does: an input or invokes, real values, printing, stopping early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight, save
from tests.guide.alone import module_of
from tests.guide.served import printed
from tests.hook_reference import outputs_of


def test_a_trace_is_one_forward_pass(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello World"):
        output = gpt2.output.save()
    expected = module_of(gpt2)(**gpt2.tokenizer("Hello World", return_tensors="pt"))
    assert type(output) is type(expected)
    assert torch.equal(output.logits, expected.logits)


def test_generation_gives_the_tokens_of_transformers(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=5):
        output = gpt2.generator.output.save()
    plain: Any = module_of(gpt2)
    inputs = gpt2.tokenizer("Hello", return_tensors="pt")
    assert torch.equal(output, plain.generate(**inputs, max_new_tokens=5))


def test_a_trace_needs_an_input_or_invokes(gpt2: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"The model did not execute.*tracer\.invoke"), gpt2.trace():
        gpt2.output.save()


def test_an_input_makes_an_implicit_invoke(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        implicit = gpt2.lm_head.output.save()
    with gpt2.trace() as tracer, tracer.invoke("Hello"):
        explicit = gpt2.lm_head.output.save()
    assert torch.equal(implicit, explicit)


def test_printing_works_as_anywhere(gpt2: LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    with gpt2.trace("Hello"):
        out = gpt2.transformer.h[0].output
        print("Shape:", out.shape)  # noqa: T201 - the example
        print("Mean:", out.mean())  # noqa: T201
    (expected,) = outputs_of(gpt2._module, gpt2.tokenizer("Hello", return_tensors="pt"), "transformer.h.0")
    assert printed(capsys.readouterr().out) == f"Shape: {expected.shape}\nMean: {expected.mean()!s}\n"


def test_stop_ends_the_run_there(tiny: NNsight, features: torch.Tensor) -> None:
    ran: list[str] = []
    hook = tiny._module.get_submodule("layer2").register_forward_hook(lambda *_: ran.append("layer2"))
    with tiny.trace(features) as tracer:
        hidden = tiny.layer1.output.save()
        tracer.stop()
        ran.append("after stop")
    hook.remove()
    assert ran == []
    assert torch.equal(hidden, tiny._module.get_submodule("layer1")(features))


def test_printing_the_model_shows_its_structure(gpt2: LanguageModel) -> None:
    lines = [line.strip() for line in repr(gpt2).splitlines()]
    assert lines[0] == "GPT2LMHeadModel("
    assert "(transformer): GPT2Model(" in lines
    assert "(h): ModuleList(" in lines
    assert "(0-3): 4 x GPT2Block(" in lines
    assert "(attn): GPT2Attention(" in lines
    assert any(line.startswith("(lm_head): Linear(") for line in lines)
    assert repr(gpt2.transformer.h[0]).startswith("GPT2Block(")


def test_shapes_are_real_and_can_be_used_at_once(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hs = gpt2.transformer.h[0].output
        shape = save(hs.shape)
        zeros = save(torch.zeros(shape))
        kind = save(type(hs))
    assert kind is torch.Tensor
    assert isinstance(shape, torch.Size)
    num_tokens = len(gpt2.tokenizer("Hello")["input_ids"])
    assert zeros.shape == shape == (1, num_tokens, gpt2.config.hidden_size)


def test_tensors_can_be_put_on_the_models_device(gpt2: LanguageModel) -> None:
    noise = torch.randn(gpt2.config.hidden_size)
    with gpt2.trace("Hello"):
        device = gpt2.transformer.h[0].output.device
        before = gpt2.transformer.h[0].output.clone().save()
        gpt2.transformer.h[0].output[:, -1, :] += noise.to(device)
        after = gpt2.transformer.h[1].input.save()
    assert torch.equal(after[:, -1], before[:, -1] + noise)
    assert torch.equal(after[:, :-1], before[:, :-1])
