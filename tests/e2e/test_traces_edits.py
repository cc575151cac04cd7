"""Edits that are kept in the serving engine, beside what they do locally."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams

from nnsight_engine import LanguageModel, save
from nnsight_engine.vllm_backend.traces.errors import (
    ChunkedPromptError,
    EditLimitError,
)
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import SentTrace
from tests.e2e.renamed_model import DIRECTION, GREEDY, LONG, OTHER, PROMPT, close, local, model, plain_tokens
from tests.e2e.traced_scenarios import assert_failed_as
from tests.e2e.traces import HeldTracer, Plain, run_together

__all__ = ["local", "model"]  # fixtures

pytestmark = pytest.mark.e2e


def test_edits_do_what_they_do_locally(model: VLLM, local: LanguageModel) -> None:
    found = []
    for engine, options in ((model, GREEDY), (local, {})):
        scale = 2.0
        with engine.edit() as doubled:
            engine.layers[1].output[:] *= scale
        scale = 100.0
        with doubled.edit() as shifted:
            doubled.layers[1].output[:] += DIRECTION
            doubled.layers[2].mlp.output = doubled.layers[2].mlp.output * 0
        with engine.trace(PROMPT, **options):
            untouched = engine.layers[1].output.save()
        with doubled.trace(PROMPT, **options):
            once = doubled.layers[1].output.save()
        with shifted.trace(PROMPT, **options):
            twice = shifted.layers[1].output.save()
            silent = shifted.layers[2].mlp.output.save()
            last = shifted.layers[3].output.save()
        found.append((untouched, once, twice, silent, last))
        assert scale == 100.0
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)
    untouched, once, twice, silent, _ = found[0]
    assert torch.equal(once, untouched * 2)
    assert torch.equal(twice, untouched * 2 + DIRECTION)
    assert not silent.any()


def test_edits_in_the_engine_are_chosen_by_name(model: VLLM) -> None:
    plain = plain_tokens(model, PROMPT, 4)
    with model.edit(name="force") as forced:
        model.logits.output = torch.nn.functional.one_hot(torch.tensor([7]), 319).float() * 100
    with model.edit(name="seven"):
        model.samples.output[:] += 1
    assert model.edits == ["force", "seven"]
    options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, **GREEDY}
    with model.trace(PROMPT, edits=["force"], **options) as tracer:
        one = tracer.result.save()
    with forced.trace(PROMPT, edits="seven", **options) as tracer:
        both = tracer.result.save()
    with model.trace(edits=["force"], **options) as tracer:
        with tracer.invoke(PROMPT):
            first = tracer.result.save()
        with tracer.invoke(PROMPT, edits=[]):
            second = tracer.result.save()
    found = [list(result.outputs[0].token_ids) for result in (one, both, first, second)]
    assert found == [[7] * 4, [8] * 4, [7] * 4, plain]
    assert plain_tokens(model, PROMPT, 4) == plain
    with model.trace(PROMPT, edits=["force"], **GREEDY):
        pass
    model.remove_edit("force")
    for edited, names in ((model, ["force"]), (forced, [])):
        with pytest.raises(ValueError, match="no edit 'force'; the engine keeps 'seven'"):
            with edited.trace(PROMPT, edits=names):
                pass


def test_edits_in_place_hold_until_they_are_cleared(model: VLLM) -> None:
    seen: list[int] = []
    with model.edit(inplace=True):
        seen.append(1)
        model.layers[0].output[:] = float(len(seen))
    for _ in range(2):
        with model.trace(PROMPT, **GREEDY):
            out = model.layers[0].output.save()
        assert bool((out == 1).all()), "an edit saw what another request had made of its variables"
    assert seen == []
    model.clear_edits()
    with model.trace(PROMPT, **GREEDY):
        out = model.layers[0].output.save()
    assert not bool((out == 1).all())


def test_a_name_is_one_block_and_the_engine_takes_so_many(model: VLLM) -> None:
    for _ in range(2):
        with model.edit(name="same"):
            model.layers[0].output[:] = 0
    assert model.edits == ["same"]
    with pytest.raises(ValueError, match=r"another edit 'same'.*remove_edit"), model.edit(name="same"):
        model.layers[0].output[:] = 1
    with pytest.raises(ValueError, match="1 to 200 characters"):
        model.edit(name="").__enter__()
    for number in range(2):
        with model.edit(name=f"more {number}"):
            model.layers[0].output[:] = number
    with pytest.raises(EditLimitError, match="max_edits"), model.edit(name="too many"):
        model.layers[0].output[:] = 0
    with pytest.raises(ValueError, match="lock"), open("/dev/null") as lock, model.edit(name="same too"):
        lock.read()
    assert model.edits == ["same", "more 0", "more 1"]


def test_edits_and_chunks_of_a_prompt(model: VLLM) -> None:
    num_tokens = len(model.tokenizer.encode(LONG))
    value = torch.randn(num_tokens, 128, generator=torch.Generator().manual_seed(1))
    with model.edit() as replaced:
        model.model.layers[1].mlp.output = value
    with replaced.trace(LONG, **GREEDY):
        out = replaced.layers[1].mlp.output.save()
    assert torch.equal(out, value)
    with model.edit() as scaled:
        model.layers[1].mlp.output[:] *= 2
    with pytest.raises(ChunkedPromptError, match=r"layers\.1\.mlp") as caught, scaled.trace(LONG, **GREEDY):
        pass
    assert "in the edit" in caught.value.__notes__[0]


def failing(model: VLLM) -> dict[str, SentTrace]:
    """Return traces whose edits end badly, each in its own way, by the names of their errors."""
    options: dict[str, Any] = {"max_tokens": 8, "tracer_cls": HeldTracer, "ignore_eos": True, **GREEDY}
    edited: dict[str, Any] = {}
    with model.edit() as edited["RuntimeError"]:
        model.layers[1].output @ torch.ones(3)
    with model.edit() as edited["TimeBudgetError"]:
        model.layers[1].output
        while True:
            pass
    with model.edit() as edited["OutOfOrderError"]:
        model.layers[2].output
        model.layers[1].output
    with model.edit() as edited["MissedProviderError"]:
        model.model.layers[1].self_attn.rotary_emb.apply_rotary_emb.output
    held = {}
    for name, one in edited.items():
        with one.trace(PROMPT, **options) as tracer:
            out = save(one.layers[3].output)  # noqa: F841 - never comes home
        held[name] = tracer.sent
    return held


def test_an_edit_that_fails_fails_its_own_request(model: VLLM) -> None:
    greedy = SamplingParams(max_tokens=8, **GREEDY)
    plain = [Plain(f"{OTHER} {number}", greedy) for number in range(5)]
    quiet = run_together(model, [], plain)
    with model.edit() as fine:
        model.layers[1].output[:] *= 1.5
    with fine.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as well:
        cache = well.cache()  # noqa: F841 - fetched by name
    held = failing(model)
    ran = run_together(model, [well.sent, *held.values()], plain, late=2)
    for number in range(len(plain)):
        assert ran.tokens(f"plain-{number}") == quiet.tokens(f"plain-{number}")
    assert len(ran.outcomes[0].saves["cache"]) > 40
    for number, name in enumerate(held, 1):
        assert_failed_as(name, ran.outcomes[number])
        assert any("in the edit" in note for note in getattr(ran.outcomes[number].error, "__notes__", ()))
