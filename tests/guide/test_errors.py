"""The usual errors, and ways to find what is wrong."""

from __future__ import annotations

import io
import pdb
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

import pytest
import torch
from nnsight_engine.intervention.interleaver import MissedProviderError, OutOfOrderError
from nnsight_engine.intervention.tracing.base import WithBlockNotFoundError

from nnsight_engine import CONFIG, LanguageModel, NNsight, save
from tests.guide.alone import tokens
from tests.guide.modules import TinyMLP
from tests.guide.served import printed
from tests.hook_reference import outputs_of


def test_out_of_order_access_names_the_value_and_asks_about_the_order(gpt2: LanguageModel) -> None:
    with pytest.raises(OutOfOrderError) as caught, gpt2.trace("Hello"):
        gpt2.transformer.h[3].output.save()
        gpt2.transformer.h[2].output.save()
    assert str(caught.value).startswith(
        "Value was missed for model.transformer.h.2.output.i0. Did you call an Envoy out of order?"
    )
    assert isinstance(caught.value, ValueError)


def test_the_suffix_of_a_missed_value_is_its_step(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(OutOfOrderError, match=r"model\.transformer\.h\.2\.output\.i1"),
        gpt2.generate("Hello", max_new_tokens=3) as tracer,
    ):
        for _ in tracer.iter[1]:
            gpt2.transformer.h[3].output.save()
            gpt2.transformer.h[2].output.save()


def test_the_fix_is_the_order_of_the_model_or_separate_invokes(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            out2 = gpt2.transformer.h[3].output.save()
        with tracer.invoke():
            out1 = gpt2.transformer.h[2].output.save()
    expected = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.2", "transformer.h.3")
    assert torch.equal(out1, expected[0])
    assert torch.equal(out2, expected[1])


def test_a_module_that_is_never_called_is_named_at_the_end(features: torch.Tensor) -> None:
    class Partial(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.used(x)
            return hidden

    model = NNsight(Partial())
    with pytest.raises(MissedProviderError) as caught, model.trace(features):
        model.unused.output.save()
    message = str(caught.value)
    assert message.startswith("Execution complete but `model.unused.output.i0` was not provided.")
    assert "Did you call an Envoy out of order?" in message
    assert "Investigate why this module was not called" in message
    assert isinstance(caught.value, ValueError)


def test_gradients_in_the_wrong_order_are_named_by_the_id_of_their_tensor(
    tiny: NNsight, features: torch.Tensor
) -> None:
    message = r"Execution complete but `\d+\.grad` was not provided"
    with pytest.raises(ValueError, match=message) as caught, tiny.trace(features):
        out1 = tiny.layer1.output
        out2 = tiny.layer2.output
        identity = save(id(out2))
        loss = tiny.output.sum()
        with loss.backward():
            out1.grad.save()
            out2.grad.save()
    assert f"`{identity}.grad`" in str(caught.value)


def test_the_fix_is_the_reverse_order(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        out1 = tiny.layer1.output
        out2 = tiny.layer2.output
        loss = tiny.output.sum()
        with loss.backward():
            grad2 = out2.grad.save()
            grad1 = out1.grad.save()
    assert torch.equal(grad2, torch.ones(1, 2))
    torch.testing.assert_close(grad1, TinyMLP().layer2.weight.sum(0, keepdim=True))


def test_a_trace_without_input_cannot_give_a_value(tiny: NNsight) -> None:
    message = "Cannot return output of Envoy that is not interleaving nor has a fake output set"
    with pytest.raises(ValueError, match=message), tiny.trace():
        tiny.layer1.output.save()


def test_the_fix_is_an_input_for_the_trace_or_for_an_invoke(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        direct = tiny.layer1.output.save()
    with tiny.trace() as tracer, tracer.invoke(features):
        invoked = tiny.layer1.output.save()
    assert torch.equal(direct, TinyMLP().layer1(features))
    assert torch.equal(invoked, direct)


def test_a_module_that_does_not_exist_is_answered_with_the_way_to_see_the_tree(
    tiny: NNsight, features: torch.Tensor
) -> None:
    with pytest.raises(AttributeError) as caught, tiny.trace(features):
        tiny.fake_layer.output.save()
    assert str(caught.value) == (
        "TinyMLP at model has no attribute fake_layer. Did you mean 'layer2' or 'layer1'? "
        "print(model) shows the tree."
    )


def test_a_with_block_that_is_not_found_says_where_it_was_looked_for(tiny: NNsight) -> None:
    # Code made at run time, whose text is nowhere.
    text = "with model.trace(x):\n    model.layer1.output.save()\n"
    with pytest.raises(WithBlockNotFoundError, match="<made>"):
        exec(compile(text, "<made>", "exec"), {"model": tiny, "x": torch.ones(1, 5)})


def test_invokes_cannot_be_nested(gpt2: LanguageModel) -> None:
    message = "Cannot invoke during an active model execution / interleaving"
    with pytest.raises(ValueError, match=message), gpt2.trace() as tracer, tracer.invoke("Hello"):
        gpt2.transformer.h[0].output.save()
        with tracer.invoke("World"):
            gpt2.transformer.h[1].output.save()


def test_an_invoke_cannot_stand_in_a_trace_with_an_input(gpt2: LanguageModel) -> None:
    message = "Cannot invoke during an active model execution / interleaving"
    with pytest.raises(ValueError, match=message), gpt2.trace("Hello") as tracer, tracer.invoke("World"):
        gpt2.transformer.h[0].output.save()


def test_the_fix_is_invokes_one_after_the_other(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            out1 = gpt2.transformer.h[0].output.save()
        with tracer.invoke("World"):
            out2 = gpt2.transformer.h[0].output.save()
    (both,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "transformer.h.0")
    assert torch.equal(torch.cat([out1, out2]), both)


def test_a_value_of_a_module_in_a_backward_block_is_refused(tiny: NNsight, features: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="in a backwards tracer") as caught, tiny.trace(features):
        loss = tiny.layer1.output.sum()
        with loss.backward():
            tiny.layer2.output.save()
    message = str(caught.value)
    assert message.startswith("Cannot request `model.layer2.output.i0` in a backwards tracer.")
    assert "You can only request `.grad`." in message
    assert "define your Tensors before the Backwards Tracer" in message


# 7.8 Debugging strategies.


def test_printing_a_model_or_a_part_shows_its_structure(tiny: NNsight, gpt2: LanguageModel) -> None:
    assert str(tiny) == str(TinyMLP())
    shown = str(gpt2.transformer.h[0])
    assert shown.startswith("GPT2Block(\n")
    for name in ("ln_1", "attn", "c_attn", "mlp", "c_proj"):
        assert f"({name}):" in shown


def test_print_works_inside_a_trace(gpt2: LanguageModel) -> None:
    shown = io.StringIO()
    with redirect_stdout(shown), gpt2.trace("Hello"):
        out = gpt2.transformer.h[0].output
        print("Layer 0 shape:", out.shape)  # noqa: T201 - the example
        print("Layer 0 mean:", out.mean().item())  # noqa: T201 - the example
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert printed(shown.getvalue()).splitlines() == [
        "Layer 0 shape: torch.Size([1, 5, 128])",
        f"Layer 0 mean: {expected.mean().item()}",
    ]


def test_breakpoint_stops_in_the_block_with_its_variables(
    gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, tuple[int, ...]]] = []

    def stop_here() -> None:
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_filename, frame.f_lineno, tuple(frame.f_locals["out"].shape)))

    monkeypatch.setattr(sys, "breakpointhook", stop_here)
    with gpt2.trace("Hello"):
        out = gpt2.transformer.h[0].output
        breakpoint()
        modified = (out * 2).save()
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert torch.equal(modified, expected * 2)
    ((file, line, shape),) = seen
    assert file == __file__
    assert "breakpoint()" in line_of(file, line)
    assert shape == (1, 5, 128)


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


def line_of(file: str, number: int) -> str:
    """Return a line of a file."""
    with open(file, encoding="utf-8") as lines:
        return lines.read().splitlines()[number - 1]


def test_a_scan_prints_shapes(gpt2: LanguageModel) -> None:
    printed = io.StringIO()
    with redirect_stdout(printed), gpt2.scan("Hello"):
        print(tuple(gpt2.transformer.h[0].output.shape))  # noqa: T201 - the example
    assert printed.getvalue() == "(1, 5, 128)\n"


def test_debug_mode_is_an_option_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONFIG.APP.DEBUG is False
    monkeypatch.setattr(CONFIG.APP, "DEBUG", True)
    assert CONFIG.APP.DEBUG is True


def test_modules_are_accessed_one_at_a_time_to_find_their_order(gpt2: LanguageModel) -> None:
    passed = []
    for access in (first_layer, last_layer):
        with gpt2.trace("Hello"):
            access(gpt2)
        passed.append(access)
    assert passed == [first_layer, last_layer]


def first_layer(model: LanguageModel) -> None:
    """Wait for the first layer, in a function that a block calls."""
    model.transformer.h[0].output.save()


def last_layer(model: LanguageModel) -> None:
    """Wait for the last layer."""
    model.transformer.h[3].output.save()


def test_a_function_that_waits_can_be_called_from_a_block(gpt2: LanguageModel) -> None:
    def read(model: LanguageModel, layer: int) -> torch.Tensor:
        hidden: torch.Tensor = model.transformer.h[layer].output
        return hidden

    run: Callable[[LanguageModel, int], torch.Tensor] = read
    with gpt2.trace("Hello"):
        values = save([run(gpt2, layer) for layer in range(4)])
    paths = [f"transformer.h.{layer}" for layer in range(4)]
    assert all(map(torch.equal, values, outputs_of(gpt2._module, tokens(gpt2, "Hello"), *paths)))
