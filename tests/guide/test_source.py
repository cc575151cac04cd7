"""``source`` reaches the calls inside a module's forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nnsight_engine.intervention.envoy import OperationEnvoy

import nnsight_engine
from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import module_of, tokens
from tests.hook_reference import outputs_of, recorded_inputs

PROJECTION = "transformer.h.0.attn.c_proj"


def projection_input(model: LanguageModel) -> Any:
    """Return what the first attention projects: the heads' outputs side by side."""
    with recorded_inputs(model._module, PROJECTION) as plain:
        module_of(model)(**tokens(model, "Hello"))
    return plain[0][0][0]


def test_printing_the_source_shows_operations_and_their_lines(gpt2: LanguageModel) -> None:
    shown = str(gpt2.transformer.h[0].attn.source)
    lines = {line.split("->")[0].strip(): line for line in shown.splitlines() if "->" in line}
    assert "attn_output, attn_weights = attention_interface(" in lines["attention_interface_0"]
    assert "attn_output = self.c_proj(attn_output)" in lines["self_c_proj_0"]
    assert "attn_output = self.resid_dropout(attn_output)" in lines["self_resid_dropout_0"]


def test_an_operation_has_an_output(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        heads, _ = gpt2.transformer.h[0].attn.source.attention_interface_0.output
        heads = heads.save()
    # [rows, tokens, heads, head_dim], which the projection takes side by side.
    assert heads.shape == (1, 5, 4, 32)
    assert torch.equal(heads.reshape(1, 5, 128), projection_input(gpt2))


def test_an_operation_has_an_input(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        operation = gpt2.transformer.h[0].attn.source.self_c_proj_0
        given = operation.input.save()
        projected = operation.output.save()
    assert torch.equal(given, projection_input(gpt2))
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), PROJECTION)
    assert torch.equal(projected, expected)


def test_an_operation_has_all_inputs(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        args, kwargs = gpt2.transformer.h[0].attn.source.attention_interface_0.inputs
        num_args = nnsight_engine.save(len(args))
        module, query = nnsight_engine.save(args[0]), args[1].save()
        scaling = nnsight_engine.save(kwargs["scaling"])
    assert num_args == 5
    assert module is gpt2.transformer.h[0].attn._module
    assert query.shape == (1, 4, 5, 32)
    assert scaling == 32**-0.5


def test_an_operation_can_be_set(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        operation = gpt2.transformer.h[0].attn.source.self_c_proj_0
        operation.input = torch.zeros(1, 5, 128)
        attended = gpt2.transformer.h[0].attn.output[0].save()
    bias = module_of(gpt2.transformer.h[0].attn.c_proj).bias
    torch.testing.assert_close(attended, bias.expand(1, 5, 128))


def test_operations_can_be_traced_into(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        inner = gpt2.transformer.h[0].attn.source.attention_interface_0.source
        names = nnsight_engine.save([operation.path for operation in inner])
        computed = inner.torch_nn_functional_scaled_dot_product_attention_0.output.save()
        heads, _ = gpt2.transformer.h[0].attn.source.attention_interface_0.output
        heads = heads.save()
    root = "model.transformer.h.0.attn.attention_interface_0"
    assert f"{root}.torch_nn_functional_scaled_dot_product_attention_0" in names
    assert torch.equal(computed.transpose(1, 2), heads)


def test_the_source_of_a_module_is_rewritten_for_its_traces_only(gpt2: LanguageModel) -> None:
    module = gpt2.transformer.h[2].attn._module
    forward = type(module).forward
    _ = gpt2.transformer.h[2].attn.source
    assert isinstance(gpt2.transformer.h[2].attn.source.self_c_proj_0, OperationEnvoy)
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
