"""Standard points where values are more than numbers: rows of several invokes, gradients, fused attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nnsight_engine.envoys.architectures.named_points import PatternError
from nnsight_engine.modeling.base import NNsight
from tests.families.checkpoints import NUM_LAYERS, write_checkpoint
from tests.families.moves import move, moved, points_of_a_layer
from tests.families.reference import load_reference_model
from tests.small_models import Rows

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT_IDS = [45, 257, 80, 301, 77, 78, 260, 90]
IDS = torch.tensor([PROMPT_IDS])
PAIR = torch.tensor([PROMPT_IDS, PROMPT_IDS[::-1]])
LAYOUTS = ("llama", "gemma2", "phi3", "gpt2", "opt", "opt_post_norm", "gpt_neox")
"""One family of each layout; the others differ in what is computed, not in where."""


@pytest.fixture(scope="module", params=LAYOUTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(str(request.param), tmp_path_factory.mktemp(str(request.param)))


@pytest.fixture(scope="module")
def module(checkpoint: Path) -> Any:
    """The family's model, with eager attention."""
    return load_reference_model(checkpoint)


@pytest.fixture(scope="module")
def fused(checkpoint: Path) -> Any:
    """The family's model, with attention that never forms probabilities."""
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    ).eval()


def logits_of(module: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = module(IDS, use_cache=False).logits
    return logits


# Rows of several invokes.


def test_each_invoke_reads_its_own_rows(module: Any) -> None:
    model = Rows(module)
    whole, first, second = {}, {}, {}
    with torch.no_grad(), model.trace(PAIR):
        for name in points_of_a_layer(model.points):
            whole[name] = model.points[name].save()
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(PAIR[:1]):
            for name in points_of_a_layer(model.points):
                first[name] = model.points[name].save()
        with tracer.invoke(PAIR[1:]):
            for other in points_of_a_layer(model.points):  # invokes take turns, and share their variables
                second[other] = model.points[other].save()
    for name, value in whole.items():
        assert torch.equal(torch.cat([first[name], second[name]]), value), name


def test_an_invoke_writes_its_own_rows_only(module: Any) -> None:
    model = Rows(module)
    with torch.no_grad():
        plain = module(PAIR).logits
    for name in points_of_a_layer(model.points):
        with torch.no_grad(), model.trace() as tracer:
            with tracer.invoke(PAIR[:1]):
                untouched = model.points["logits"].save()
            with tracer.invoke(PAIR[1:]):
                model.points[name] = moved(model.points[name])
                written = model.points["logits"].save()
        with torch.no_grad(), model.trace() as tracer:
            with tracer.invoke(PAIR[:1]):
                pass
            with tracer.invoke(PAIR[1:]):
                move(model.points[name])
                edited = model.points["logits"].save()
        assert torch.equal(untouched, plain[:1]), name
        assert torch.equal(written, edited), name
        assert not torch.equal(written, plain[1:]), name


# Gradients.


def test_gradients_reach_what_a_point_gives(module: Any) -> None:
    model = NNsight(module)
    for name in points_of_a_layer(model.points):
        with model.trace(IDS, use_cache=False):
            value = model.points[name].save()
            logit = model.points["logits"][0, -1, 7].save()
        found = torch.autograd.grad(logit, value)[0]
        leaf = value.detach().clone().requires_grad_()
        with model.trace(IDS, use_cache=False):
            model.points[name] = leaf
            logit = model.points["logits"][0, -1, 7].save()
        torch.testing.assert_close(found, torch.autograd.grad(logit, leaf)[0], rtol=1e-5, atol=1e-6)


def test_an_edit_in_place_reaches_the_model_while_gradients_are_recorded(module: Any) -> None:
    model = NNsight(module)
    for name in points_of_a_layer(model.points):
        with torch.no_grad(), model.trace(IDS, use_cache=False):
            move(model.points[name])
            expected = model.points["logits"].save()
        with model.trace(IDS, use_cache=False):
            move(model.points[name])
            found = model.points["logits"].save()
        assert found.requires_grad
        assert torch.equal(found, expected), name


def test_gradients_of_two_invokes_reach_the_rows_of_each(module: Any) -> None:
    model = Rows(module)
    for name in points_of_a_layer(model.points):
        with model.trace(PAIR):
            value = model.points[name].save()
            logits = model.points["logits"][:, -1, 7].save()
        expected = torch.autograd.grad(logits.sum(), value)[0]
        with model.trace() as tracer:
            with tracer.invoke(PAIR[:1]):
                first = model.points[name].save()
                first_logit = model.points["logits"][0, -1, 7].save()
            with tracer.invoke(PAIR[1:]):
                second = model.points[name].save()
                second_logit = model.points["logits"][0, -1, 7].save()
        found = torch.cat(torch.autograd.grad(first_logit + second_logit, (first, second)))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# Fused attention.


def test_the_pattern_of_fused_attention_is_what_it_weighs_values_with(fused: Any) -> None:
    model = NNsight(fused)
    mask = torch.ones_like(PAIR)
    mask[0, :3] = 0
    for layer in range(NUM_LAYERS):
        with torch.no_grad(), model.trace(PAIR, attention_mask=mask, use_cache=False):
            values = model.layers[layer].attn.v.save()
            pattern = model.layers[layer].attn.pattern.save()
            heads = model.layers[layer].attn.heads.save()
        repeated = values.repeat_interleave(pattern.shape[1] // values.shape[2], dim=2)
        found = torch.einsum("bhqk,bkhd->bqhd", pattern, repeated)
        torch.testing.assert_close(found, heads, rtol=1e-5, atol=1e-5)


def test_the_pattern_of_fused_attention_cannot_be_written(fused: Any) -> None:
    model = NNsight(fused)
    with pytest.raises(PatternError, match="eager"), torch.no_grad(), model.trace(IDS):
        model.layers[0].attn.pattern = torch.zeros(1, 4, 8, 8)
    with pytest.raises(PatternError, match="eager"), torch.no_grad(), model.trace(IDS):
        model.layers[0].attn.pattern[:] = 0


def test_asking_for_a_pattern_leaves_fused_attention_as_it_is(fused: Any) -> None:
    model = NNsight(fused)
    with torch.no_grad(), model.trace(IDS, use_cache=False):
        for name in model.points:
            model.points[name]
        found = model.points["logits"].save()
    assert torch.equal(found, logits_of(fused))
