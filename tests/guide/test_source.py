"""``source``: the calls inside a module's forward, printed, read and edited by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight, save
from tests.guide.alone import module_of, tokens
from tests.hook_reference import edited, outputs_of, recorded_inputs

PROJECTION = "transformer.h.0.attn.c_proj"


def projection_input(model: LanguageModel) -> Any:
    """Return what the first attention projects: the heads' outputs side by side, ``[1, 5, 128]``."""
    with recorded_inputs(model._module, PROJECTION) as plain:
        module_of(model)(**tokens(model, "Hello"))
    return plain[0][0][0]


def test_printing_the_source_shows_operations_and_their_lines(gpt2: LanguageModel) -> None:
    shown = str(gpt2.transformer.h[0].attn.source)
    lines = {line.split("->")[0].strip(): line for line in shown.splitlines() if "->" in line}
    assert "attn_output, attn_weights = attention_interface(" in lines["attention_interface_0"]
    assert "attn_output = self.c_proj(attn_output)" in lines["self_c_proj_0"]
    assert "attn_output = self.resid_dropout(attn_output)" in lines["self_resid_dropout_0"]
    operation = repr(gpt2.transformer.h[0].attn.source.attention_interface_0).splitlines()
    assert operation[0].endswith(".transformer.h.0.attn.attention_interface_0:")
    (marked,) = (line for line in operation if line.startswith("-->"))
    assert marked.endswith("<--")
    assert "attn_output, attn_weights = attention_interface(" in marked


def test_an_operations_output_and_inputs_are_read(gpt2: LanguageModel) -> None:
    attn = gpt2.transformer.h[0].attn
    with gpt2.trace("Hello"):
        args, kwargs = (save(part) for part in attn.source.attention_interface_0.inputs)
        heads = attn.source.attention_interface_0.output[0].save()
        given = attn.source.self_c_proj_0.input.save()
        projected = attn.source.self_c_proj_0.output.save()
    assert args[0] is attn._module  # what the forward passes as ``self``
    assert kwargs["scaling"] == attn._module.scaling == 32**-0.5
    assert args[1].shape == heads.transpose(1, 2).shape == (1, 4, 5, 32)
    assert torch.equal(heads.flatten(-2), projection_input(gpt2))
    assert torch.equal(given, projection_input(gpt2))
    assert torch.equal(projected, *outputs_of(gpt2._module, tokens(gpt2, "Hello"), PROJECTION))


def test_an_operation_can_be_edited_in_place_and_replaced(gpt2: LanguageModel) -> None:
    operation = gpt2.transformer.h[0].attn.source.self_c_proj_0
    with gpt2.trace("Hello"):
        operation.output[:] = 0
        zeroed = gpt2.lm_head.output.save()
    with gpt2.trace("Hello"):
        operation.output = operation.output * 2
        doubled = gpt2.lm_head.output.save()
    with gpt2.trace("Hello"):
        operation.input = torch.zeros(1, 5, 128)
        attended = gpt2.transformer.h[0].attn.output[0].save()
    ids = tokens(gpt2, "Hello")
    with edited(gpt2._module, PROJECTION, torch.zeros_like):
        assert torch.equal(zeroed, *outputs_of(gpt2._module, ids, "lm_head"))
    with edited(gpt2._module, PROJECTION, lambda output: output * 2):
        assert torch.equal(doubled, *outputs_of(gpt2._module, ids, "lm_head"))
    bias = module_of(gpt2.transformer.h[0].attn.c_proj).bias
    torch.testing.assert_close(attended, bias.expand(1, 5, 128))


def test_a_function_that_is_called_is_traced_into(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        inner = gpt2.transformer.h[0].attn.source.attention_interface_0.source
        names = save([operation.path for operation in inner])
        computed = inner.torch_nn_functional_scaled_dot_product_attention_0.output.save()
    root = "model.transformer.h.0.attn.attention_interface_0"
    assert f"{root}.torch_nn_functional_scaled_dot_product_attention_0" in names
    assert torch.equal(computed.transpose(1, 2).flatten(-2), projection_input(gpt2))


def test_a_module_is_asked_for_its_own_source(gpt2: LanguageModel) -> None:
    attn = gpt2.transformer.h[0].attn
    with pytest.raises(ValueError, match="module"), gpt2.trace("Hello"):
        attn.source.self_c_proj_0.source  # noqa: B018 - reading it is the test
    with gpt2.trace("Hello"):
        projected = attn.c_proj.source.torch_addmm_0.output.save()
        proj_out = attn.c_proj.output.save()
    assert torch.equal(projected.view(proj_out.shape), proj_out)


def test_the_source_of_a_module_is_rewritten_for_its_traces_only(gpt2: LanguageModel) -> None:
    module = gpt2.transformer.h[2].attn._module
    forward = type(module).forward
    with gpt2.trace("Hello"):
        gpt2.transformer.h[2].attn.source.self_c_proj_0.output.save()
    assert "forward" not in module.__dict__
    assert type(module).forward is forward


def test_an_operation_that_is_not_there_is_named_with_those_that_are(gpt2: LanguageModel) -> None:
    with pytest.raises(AttributeError, match=r"makes no call 'nothing_0'; it makes .*self_c_proj_0"):
        _ = gpt2.transformer.h[0].attn.source.nothing_0


def test_source_of_a_custom_module(features: torch.Tensor) -> None:
    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = torch.nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = torch.softmax(self.key(x), dim=-1)
            return scores @ torch.ones(3, 2)

    model = NNsight(Scores())
    with model.trace(features):
        scores = model.source.torch_softmax_0.output.save()
        model.source.torch_softmax_0.output = torch.zeros(1, 3)
        out = model.output.save()
    assert torch.equal(scores, torch.softmax(model.key._module(features), dim=-1))
    assert torch.equal(out, torch.zeros(1, 2))
