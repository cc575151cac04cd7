"""Envoy classes of one's own for some modules, with properties that are views of a module's value.

Which modules a class is chosen for is in ``unit/envoys/test_envoys_map``.
"""

# Views are defined as the guide does, by the name of the stub, as a setter is.
# mypy: disable-error-code="no-redef"

from __future__ import annotations

from typing import Any

import pytest
import torch
from nnsight_engine.intervention.envoy import Envoy, OperationEnvoy, eproperty
from nnsight_engine.intervention.hooks import requires_input, requires_output

from nnsight_engine import LanguageModel, NNsight
from tests.guide.attention import (
    HEAD_WIDTH,
    NUM_HEADS,
    WIDTH,
    Attender,
    Attention,
    AttnEnvoy,
    Block,
    BlockEnvoy,
)
from tests.guide.modules import TinyMLP
from tests.hook_reference import edited, on_first, outputs_of


class StreamEnvoy(AttnEnvoy):
    """Has properties that give copies, with and without a way back, and one of the inputs."""

    @eproperty(key="output")
    @requires_output
    def detached(self) -> Any:
        """A copy that goes nowhere."""

    @detached.preprocess
    def detached(self, value: Any) -> Any:
        return value.clone()

    @eproperty(key="output")
    @requires_output
    def by_head(self) -> Any:
        """A copy with heads as a dimension, ``[num_rows, num_heads, num_tokens, head_width]``."""

    @by_head.preprocess
    def by_head(self, value: Any) -> Any:
        return value.unflatten(2, (self.n_heads, -1)).transpose(1, 2).clone()

    @by_head.transform
    @staticmethod
    def by_head(value: Any) -> Any:
        return value.transpose(1, 2).flatten(2)

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


def without_head(head: int) -> Any:
    """Return an edit that zeroes a head."""

    def zeroed(value: torch.Tensor) -> torch.Tensor:
        value[:, :, head * HEAD_WIDTH : (head + 1) * HEAD_WIDTH] = 0
        return value

    return on_first(zeroed)


def test_a_head_is_zeroed_in_place_on_the_models_tensor(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        attender.layers[0].self_attn.zero(1)
        heads = attender.layers[1].self_attn.heads.save()
        heads[3][:] = 0
        out = attender.output.save()
    with edited(attender._module, "layers.0.self_attn", without_head(1)):
        (attended,) = outputs_of(attender._module, {"x": rows}, "layers.1.self_attn")
        with edited(attender._module, "layers.1.self_attn", without_head(3)):
            assert torch.equal(out, attender._module(rows))
    assert len(heads) == NUM_HEADS
    assert torch.equal(heads[0], attended[..., :HEAD_WIDTH])
    assert not heads[3].any()


def test_each_invoke_has_heads_of_its_own_rows_of_transformers_classes_too(local_gpt2: LanguageModel) -> None:
    attention = type(local_gpt2.transformer.h[0].attn._module)
    model = LanguageModel(local_gpt2._module, tokenizer=local_gpt2.tokenizer, envoys={attention: AttnEnvoy})
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            model.transformer.h[1].attn.heads[0][:] = 0
            edited_logits = model.lm_head.output.save()
        with tracer.invoke("World"):
            untouched_logits = model.lm_head.output.save()

    def first_row_without_first_head(value: torch.Tensor) -> torch.Tensor:
        value[0, :, : 128 // NUM_HEADS] = 0
        return value

    inputs = model.tokenizer(["Hello", "World"], return_tensors="pt")
    with edited(model._module, "transformer.h.1.attn", on_first(first_row_without_first_head)):
        (expected,) = outputs_of(model._module, inputs, "lm_head")
    assert torch.equal(torch.cat([edited_logits, untouched_logits]), expected)


def test_a_view_unpacks_a_tuple_and_what_is_assigned_is_packed(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        hidden = attender.layers[0].hidden.save()
        raw = attender.layers[0].output.save()
        hidden[:, 0] = 0
        in_place = attender.output.save()
    with attender.trace(rows):
        attender.layers[0].hidden = torch.ones(2, 3, WIDTH)
        replaced = attender.output.save()

    def first_token_zero(value: torch.Tensor) -> torch.Tensor:
        value[:, 0] = 0
        return value

    assert isinstance(raw, tuple)
    assert hidden is raw[0]
    with edited(attender._module, "layers.0", on_first(first_token_zero)):
        assert torch.equal(in_place, attender._module(rows))
    with edited(attender._module, "layers.0", on_first(torch.ones_like)):
        assert torch.equal(replaced, attender._module(rows))


def test_edits_of_a_copy_are_lost_unless_a_transform_puts_them_back(
    attender: NNsight, rows: torch.Tensor
) -> None:
    with attender.trace() as tracer:
        with tracer.invoke(rows):
            attn = attender.layers[0].self_attn
            attn.detached[:] = 0
            attn.by_head[:, 2] = 0
            attn.by_head[:, 3] *= 2  # another access, and another copy
        with tracer.invoke():
            output = attender.output.save()

    def third_head_zero_fourth_doubled(value: torch.Tensor) -> torch.Tensor:
        value[:, :, 6:9] = 0
        value[:, :, 9:12] *= 2
        return value

    with edited(attender._module, "layers.0.self_attn", on_first(third_head_zero_fourth_doubled)):
        assert torch.equal(output, attender._module(rows))


def test_several_properties_may_share_a_key(attender: NNsight, rows: torch.Tensor) -> None:
    with attender.trace(rows):
        first = attender.layers[0].self_attn.first.save()
        args, _ = attender.layers[0].self_attn.inputs
        same = (args[0] is first) and (attender.layers[0].self_attn.input is first)
        assert same
    assert torch.equal(first, rows)


def test_the_stub_gives_name_and_docstring_and_its_body_never_runs(features: torch.Tensor) -> None:
    class Loud(Envoy):
        @eproperty(key="output")
        @requires_output
        def loud(self) -> Any:
            """What help() shows."""
            raise AssertionError("the body of a stub ran")

        @eproperty()
        def logits(self) -> Any:
            """Provided from elsewhere, under its own name."""

    model = NNsight(TinyMLP(), envoys=Loud)
    with model.trace(features):
        output = model.layer1.loud.save()
    assert torch.equal(output, TinyMLP().layer1(features))
    assert Loud.loud.__doc__ == "What help() shows."
    assert (Loud.loud.name, Loud.loud.key) == ("loud", "output")
    assert Loud.logits.key == Loud.logits.name == "logits"
    assert {"loud", "logits"} <= set(dir(model.layer1))


def test_operations_have_properties_of_the_same_kind(attender: NNsight, rows: torch.Tensor) -> None:
    assert isinstance(OperationEnvoy.output, eproperty)
    with attender.trace(rows):
        weights = attender.layers[0].self_attn.source.torch_softmax_0.output.save()
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]))
