"""``source``: the calls inside a module's forward, printed, read and edited by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, save
from tests.guide.alone import module_of
from tests.hook_reference import edited, outputs_of, recorded_inputs

TEXT = "Hello"


def input_of(model: LanguageModel, path: str) -> torch.Tensor:
    """Return the first argument of the module at ``path``, seen by a torch hook."""
    with recorded_inputs(model._module, path) as inputs:
        module_of(model)(**model.tokenizer(TEXT, return_tensors="pt"))
    tensor: torch.Tensor = inputs[0][0][0]
    return tensor


def test_printing_source_shows_operations_at_their_lines(gpt2: LanguageModel) -> None:
    lines = repr(gpt2.transformer.h[0].attn.source).splitlines()

    def line_of(operation: str) -> str:
        return next(line for line in lines if line.startswith(f"{operation} "))

    assert "->" in line_of("attention_interface_0")
    assert "attn_output, attn_weights = attention_interface(" in line_of("attention_interface_0")
    assert "attn_output = self.c_proj(attn_output)" in line_of("self_c_proj_0")
    assert "attn_output = self.resid_dropout(attn_output)" in line_of("self_resid_dropout_0")


def test_printing_an_operation_shows_it_in_its_surroundings(gpt2: LanguageModel) -> None:
    lines = repr(gpt2.transformer.h[0].attn.source.attention_interface_0).splitlines()
    assert lines[0].endswith(".transformer.h.0.attn.attention_interface_0:")
    (marked,) = (line for line in lines if line.startswith("-->"))
    assert marked.endswith("<--")
    assert "attn_output, attn_weights = attention_interface(" in marked
    assert any(line.strip() == "query_states," for line in lines)


def test_an_operations_output_and_inputs_are_read(gpt2: LanguageModel) -> None:
    attn = gpt2.transformer.h[0].attn
    with gpt2.trace(TEXT):
        args, kwargs = (save(part) for part in attn.source.attention_interface_0.inputs)
        attn_out = attn.source.attention_interface_0.output.save()
    assert args[0] is attn._module  # what the forward passes as ``self``
    assert kwargs["scaling"] == attn._module.scaling
    query, heads_out = args[1], attn_out[0]
    assert query.shape == heads_out.transpose(1, 2).shape
    assert torch.equal(heads_out.flatten(-2), input_of(gpt2, "transformer.h.0.attn.c_proj"))


def test_an_operations_output_is_edited_in_place(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        gpt2.transformer.h[0].attn.source.self_c_proj_0.output[:] = 0
        logits = gpt2.lm_head.output.save()
    inputs = gpt2.tokenizer(TEXT, return_tensors="pt")
    with edited(gpt2._module, "transformer.h.0.attn.c_proj", torch.zeros_like):
        assert torch.equal(logits, *outputs_of(gpt2._module, inputs, "lm_head"))


def test_an_operations_output_is_replaced(gpt2: LanguageModel) -> None:
    operation = gpt2.transformer.h[0].attn.source.self_c_proj_0
    with gpt2.trace(TEXT):
        operation.output = operation.output * 2
        logits = gpt2.lm_head.output.save()
    inputs = gpt2.tokenizer(TEXT, return_tensors="pt")
    with edited(gpt2._module, "transformer.h.0.attn.c_proj", lambda output: output * 2):
        assert torch.equal(logits, *outputs_of(gpt2._module, inputs, "lm_head"))


def test_a_function_that_is_called_is_traced_into(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        sdpa_out = gpt2.transformer.h[
            0
        ].attn.source.attention_interface_0.source.torch_nn_functional_scaled_dot_product_attention_0.output.save()
    heads_out = sdpa_out.transpose(1, 2).flatten(-2)
    assert torch.equal(heads_out, input_of(gpt2, "transformer.h.0.attn.c_proj"))


def test_a_module_is_asked_for_its_own_source(gpt2: LanguageModel) -> None:
    attn = gpt2.transformer.h[0].attn
    with pytest.raises(ValueError, match="module"), gpt2.trace(TEXT):
        attn.source.self_c_proj_0.source  # noqa: B018 - reading it is the test
    with gpt2.trace(TEXT):
        projected = attn.c_proj.source.torch_addmm_0.output.save()
        proj_out = attn.c_proj.output.save()
    assert torch.equal(projected.view(proj_out.shape), proj_out)


def test_source_leaves_the_forward_as_it_was(gpt2: LanguageModel) -> None:
    mlp: Any = gpt2.transformer.h[0].mlp
    before = mlp._module.forward
    with gpt2.trace(TEXT):
        mlp.source.self_c_fc_0.output.save()
    assert mlp._module.forward == before
    assert "forward" not in vars(mlp._module)
