"""The usual errors name the value and say what to do; prints, breakpoints and debuggers work in blocks."""

from __future__ import annotations

import io
import pdb
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight, save
from nnsight_engine.interleaving.events import MissedProviderError, OutOfOrderError
from tests.guide.alone import tokens
from tests.guide.modules import TinyMLP
from tests.guide.served import printed
from tests.hook_reference import outputs_of


def test_a_value_that_was_missed_is_named_with_its_step_and_the_question_of_the_order(
    gpt2: LanguageModel,
) -> None:
    with pytest.raises(OutOfOrderError) as caught, gpt2.trace("Hello"):
        gpt2.transformer.h[3].output.save()
        gpt2.transformer.h[2].output.save()
    assert str(caught.value).startswith(
        "Value was missed for model.transformer.h.2.output.i0. Did you call an Envoy out of order?"
    )
    assert isinstance(caught.value, ValueError)
    with (
        pytest.raises(OutOfOrderError, match=r"model\.transformer\.h\.2\.output\.i1"),
        gpt2.generate("Hello", max_new_tokens=3, min_new_tokens=3) as tracer,
    ):
        for _ in tracer.iter[1]:
            gpt2.transformer.h[3].output.save()
            gpt2.transformer.h[2].output.save()


def test_a_module_that_is_never_called_is_named_at_the_end(gpt2: LanguageModel) -> None:
    # Attention dropout exists, and torch's own attention does not call it.
    with pytest.raises(MissedProviderError) as caught, gpt2.trace("Hello"):
        gpt2.transformer.h[0].attn.attn_dropout.output.save()
    message = str(caught.value)
    assert message.startswith(
        "Execution complete but `model.transformer.h.0.attn.attn_dropout.output.i0` was not provided."
    )
    assert "Did you call an Envoy out of order?" in message
    assert "Investigate why this module was not called" in message
    assert isinstance(caught.value, ValueError)
    with pytest.raises(ValueError, match="was not provided"), gpt2.trace("Hello"):
        gpt2.generator.output.save()


def test_a_module_that_does_not_exist_is_answered_with_the_way_to_see_the_tree(
    tiny: NNsight, features: torch.Tensor
) -> None:
    with pytest.raises(AttributeError) as caught, tiny.trace(features):
        tiny.fake_layer.output.save()
    assert str(caught.value) == (
        "TinyMLP at model has no attribute fake_layer. Did you mean 'layer2' or 'layer1'? "
        "print(model) shows the tree."
    )


# Looking into blocks.


def test_print_works_inside_a_trace_and_a_scan(gpt2: LanguageModel) -> None:
    shown = io.StringIO()
    with redirect_stdout(shown), gpt2.trace("Hello"):
        out = gpt2.transformer.h[0].output
        print("Layer 0 shape:", out.shape)  # noqa: T201 - the example
        print("Layer 0 mean:", out.mean())  # noqa: T201 - the example
    with redirect_stdout(shown), gpt2.scan("Hello"):
        print(tuple(gpt2.transformer.h[0].output.shape))  # noqa: T201 - the example
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert printed(shown.getvalue()).splitlines() == [
        "Layer 0 shape: torch.Size([1, 5, 128])",
        f"Layer 0 mean: {expected.mean()!s}",
        "(1, 5, 128)",
    ]


def test_breakpoint_stops_in_the_block_with_its_variables(
    local_gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, tuple[int, ...]]] = []

    def stop_here() -> None:
        frame = sys._getframe(1)
        line = Path(frame.f_code.co_filename).read_text(encoding="utf-8").splitlines()[frame.f_lineno - 1]
        seen.append((frame.f_code.co_filename, line.strip(), tuple(frame.f_locals["out"].shape)))

    monkeypatch.setattr(sys, "breakpointhook", stop_here)
    with local_gpt2.trace("Hello"):
        out = local_gpt2.transformer.h[0].output
        breakpoint()
        modified = (out * 2).save()
    (expected,) = outputs_of(local_gpt2._module, tokens(local_gpt2, "Hello"), "transformer.h.0")
    assert torch.equal(modified, expected * 2)
    assert seen == [(__file__, "breakpoint()", (1, 5, 128))]


def test_the_debugger_steps_through_a_block(tiny: NNsight, features: torch.Tensor) -> None:
    answers = io.StringIO(
        "p tuple(out.shape)\nnext\np doubled.sum().item() == 2 * out.sum().item()\ncontinue\n"
    )
    shown = io.StringIO()
    debugger = pdb.Pdb(stdin=answers, stdout=shown, nosigint=True, readrc=False)
    debugger.use_rawinput = False
    with tiny.trace(features):
        out = tiny.layer1.output
        debugger.set_trace()
        doubled = out * 2
        result = doubled.save()
    assert torch.equal(result, TinyMLP().layer1(features) * 2)
    assert "(1, 10)" in shown.getvalue()
    assert "True" in shown.getvalue()


def test_a_function_that_waits_can_be_called_from_a_block(gpt2: LanguageModel) -> None:
    def read(model: LanguageModel, layer: int) -> torch.Tensor:
        hidden: torch.Tensor = model.transformer.h[layer].output
        return hidden

    with gpt2.trace("Hello"):
        values = save([read(gpt2, layer) for layer in range(4)])
    paths = [f"transformer.h.{layer}" for layer in range(4)]
    assert all(map(torch.equal, values, outputs_of(gpt2._module, tokens(gpt2, "Hello"), *paths)))
