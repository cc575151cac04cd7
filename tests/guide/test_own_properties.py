"""A property of one's own is a view of a module's value, and edits flow back."""

# Views are defined as the guide does, by the name of the stub, as a setter is.
# mypy: disable-error-code="no-redef"

from __future__ import annotations

from typing import Any

import pytest
import torch
from nnsight_engine.intervention.envoy import Envoy, OperationEnvoy, eproperty
from nnsight_engine.intervention.hooks import requires_input, requires_output
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Block

from nnsight_engine import LanguageModel, NNsight
from tests.guide.attention import WIDTH, Attender, Attention, Block
from tests.hook_reference import edited, outputs_of


class BlockEnvoy(Envoy):
    """Exposes ``.hidden``, the residual stream at the output of a transformer block."""

    @eproperty(key="output")
    @requires_output
    def hidden(self) -> Any:
        """The block's hidden-state output, unpacked from the tuple layout."""

    @hidden.preprocess
    def hidden(self, value: Any) -> Any:
        return value[0] if isinstance(value, tuple) else value


class StreamEnvoy(Envoy):
    """Has properties that give copies, and one that takes assignments in a form of its own."""

    @eproperty(key="output")
    @requires_output
    def copied(self) -> Any:
        """A copy, whose edits replace the model's value."""

    @copied.preprocess
    def copied(self, value: Any) -> Any:
        return value.clone()

    @copied.transform
    @staticmethod
    def copied(value: Any) -> Any:
        return value

    @eproperty(key="output")
    @requires_output
    def detached(self) -> Any:
        """A copy that goes nowhere."""

    @detached.preprocess
    def detached(self, value: Any) -> Any:
        return value.clone()

    @eproperty(key="output")
    @requires_output
    def heads(self) -> Any:
        """Attention heads as a dimension of their own, ``[num_rows, num_heads, num_tokens, head_width]``."""

    @heads.preprocess
    def heads(self, value: Any) -> Any:
        rows, tokens, width = value.shape
        heads = value.view(rows, tokens, self.n_heads, width // self.n_heads)
        return heads.transpose(1, 2).clone()

    @heads.transform
    @staticmethod
    def heads(value: Any) -> Any:
        return value.transpose(1, 2).reshape(value.shape[0], value.shape[2], -1)

    @eproperty(key="output")
    @requires_output
    def doubled(self) -> Any:
        """Takes half of what the model gets."""

    @doubled.postprocess
    def doubled(self, value: Any) -> Any:
        return value * 2

    @eproperty(key="input")
    @requires_input
    def first(self) -> Any:
        """The first argument, by its bare inputs."""

    @first.preprocess
    def first(self, value: Any) -> Any:
        args, _ = value
        return args[0]


@pytest.fixture
def attender() -> NNsight:
    """The model with heads, its blocks and attention with properties of their own."""
    return NNsight(Attender(), envoys={Block: BlockEnvoy, Attention: StreamEnvoy})


@pytest.fixture
def rows() -> torch.Tensor:
    """Two rows of three tokens."""
    return torch.linspace(-1, 1, 2 * 3 * WIDTH).reshape(2, 3, WIDTH)


def test_hidden_is_the_residual_stream_out_of_its_tuple(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        hidden = attender.layers[0].hidden.save()
        raw = attender.layers[0].output.save()
    (expected,) = outputs_of(attender._module, {"x": rows}, "layers.0")
    assert isinstance(raw, tuple)
    assert hidden is raw[0]
    assert torch.equal(hidden, expected[0])


def test_hidden_serves_a_block_that_returns_a_tensor_as_well(gpt2: LanguageModel) -> None:
    model = NNsight(gpt2._module, envoys={GPT2Block: BlockEnvoy, GPT2Attention: BlockEnvoy})
    inputs = gpt2.tokenizer("Hello", return_tensors="pt")
    with model.trace(inputs["input_ids"]):
        attended = model.transformer.h[1].attn.hidden.save()
        hidden = model.transformer.h[1].hidden.save()
    plain_attn, plain_block = outputs_of(model._module, inputs, "transformer.h.1.attn", "transformer.h.1")
    assert torch.equal(attended, plain_attn[0])
    assert torch.equal(hidden, plain_block)


def test_an_edit_of_what_was_unpacked_reaches_the_model(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        attender.layers[0].hidden[:, 0] = 0
        output = attender.output.save()

    def first_token_zero(value: Any) -> Any:
        hidden = value[0].clone()
        hidden[:, 0] = 0
        return hidden, None

    with edited(attender._module, "layers.0", first_token_zero):
        assert torch.equal(output, attender._module(rows))


def test_the_stub_gives_name_and_docstring_and_its_body_never_runs(
    tiny: NNsight, features: torch.Tensor
) -> None:
    class Loud(Envoy):
        @eproperty(key="output")
        @requires_output
        def loud(self) -> Any:
            """What help() shows."""
            raise AssertionError("the body of a stub ran")

    model = NNsight(tiny._module, envoys=Loud)
    with model.trace(features):
        output = model.layer1.loud.save()
    assert torch.equal(output, tiny._module.get_submodule("layer1")(features))
    assert Loud.loud.__doc__ == "What help() shows."
    assert Loud.loud.name == "loud"
    assert Loud.loud.key == "output"


def test_the_stubs_name_is_the_key_unless_one_is_given() -> None:
    @eproperty()
    def logits(self: Any) -> Any:
        """Provided from elsewhere."""

    assert logits.key == logits.name == "logits"


def test_several_properties_may_share_a_key(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        first = attender.layers[0].self_attn.first.save()
        args, _ = attender.layers[0].self_attn.inputs
        same = (args[0] is first) and (attender.layers[0].self_attn.input is first)
        assert same
    assert torch.equal(first, rows)


def test_edits_of_a_copy_are_lost_without_a_transform(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        attender.layers[0].self_attn.detached[:] = 0
        output = attender.output.save()
    assert torch.equal(output, attender._module(rows))


def test_a_transform_puts_an_edited_copy_back(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        attender.layers[0].self_attn.copied[:] = 0
        output = attender.output.save()
    with edited(attender._module, "layers.0.self_attn", torch.zeros_like):
        assert torch.equal(output, attender._module(rows))


def test_a_transform_brings_heads_back_into_the_models_layout(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        heads = attender.layers[0].self_attn.heads
        heads[:, 2] = 0
        output = attender.output.save()

    def third_head_zero(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, :, 6:9] = 0
        return value

    with edited(attender._module, "layers.0.self_attn", third_head_zero):
        assert torch.equal(output, attender._module(rows))


def test_a_transform_that_ends_the_block_is_applied_too(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace() as tracer:
        with tracer.invoke(rows):
            attender.layers[0].self_attn.heads[:] = 0
        with tracer.invoke():
            output = attender.output.save()
    with edited(attender._module, "layers.0.self_attn", torch.zeros_like):
        assert torch.equal(output, attender._module(rows))


def test_a_transform_is_for_one_access(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        attn = attender.layers[0].self_attn
        attn.copied[:] += 1
        attn.copied[:] += 1
        seen = attn.output.save()
    (plain,) = outputs_of(attender._module, {"x": rows}, "layers.0.self_attn")
    assert torch.equal(seen, plain + 1 + 1)


def test_postprocess_runs_on_what_is_assigned(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        attender.layers[0].self_attn.doubled = torch.ones(2, 3, WIDTH)
        seen = attender.layers[0].self_attn.output.save()
    assert torch.equal(seen, torch.full((2, 3, WIDTH), 2.0))


def test_operations_have_properties_of_the_same_kind(attender: NNsight, rows: torch.Tensor) -> None:
    assert isinstance(OperationEnvoy.output, eproperty)
    with attender.trace(rows):
        weights = attender.layers[0].self_attn.source.torch_softmax_0.output.save()
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]))
