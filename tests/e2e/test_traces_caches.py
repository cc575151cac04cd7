"""Caches in the serving engine, beside transformers' values."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, save
from nnsight_engine.vllm_backend.traces.errors import (
    ChunkedPromptError,
    TraceBytesError,
)
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import SentTrace
from tests.e2e.renamed_model import DIRECTION, GREEDY, LONG, OTHER, PROMPT, close, local, model, plain_tokens
from tests.e2e.traces import HeldTracer, counted_recomputations, run_together

__all__ = ["local", "model"]  # fixtures

pytestmark = pytest.mark.e2e


def test_a_cache_is_read_as_a_local_one_is(model: VLLM, local: LanguageModel) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        ours = tracer.cache(include_inputs=True)
        model.layers[1].mlp.output[:] *= 2
    with local.trace(PROMPT) as tracer:
        theirs = tracer.cache(include_inputs=True)
        local.layers[1].mlp.output[:] *= 2
    assert len(ours) > 40
    close(ours["model.model.layers.3.mlp"].output, theirs["model.model.layers.3.mlp"].output)
    close(ours.model.layers[1].output, theirs.model.layers[1].output)
    close(ours.model.layers[2].input, theirs.model.layers[2].input)
    close(ours.model.layers[0].attn.output, theirs.model.layers[0].attn.output[0])
    close(ours.model.stages[3].attention.output, theirs.model.stages[3].attention.output[0])
    close(ours.model.blocks[2].feed.output, theirs.model.blocks[2].feed.output)
    close(ours.model.layers[2].mlp.input, theirs.model.layers[2].mlp.input)
    close(ours.model.norm.output, theirs.model.norm.output)
    assert [type(value) for value in ours["model.model.layers.2"].output] == [torch.Tensor, torch.Tensor]
    below = ours.model.layers[3].keys()
    assert {path for path in below if path.endswith("mlp")} == {"model.model.layers.3.mlp"}
    assert len(ours.model.layers) == len(list(ours.model.layers))
    with pytest.raises(AttributeError, match="starts at 'model'"):
        _ = ours.transformer
    with pytest.raises(AttributeError, match=r"no value for model\.lm_head"):
        _ = ours.model.lm_head.output


def test_a_cache_of_a_generation_has_every_step(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=3, ignore_eos=True, **GREEDY) as tracer:
        modules = [model.layers[2], model.layers[1].mlp, "model.samples", "model.logits"]
        cache = tracer.cache(modules=modules, dtype=torch.float16)
    num_tokens = len(model.tokenizer.encode(PROMPT))
    assert set(cache) == {"model.model.layers.2", "model.model.layers.1.mlp", "model.samples", "model.logits"}
    assert [len(rows) for rows in cache.model.layers[2].output] == [num_tokens, 1, 1]
    assert cache.model.layers[1].mlp.output[1].dtype is torch.float16
    assert [len(step.output) for step in cache.model.layers[2]] == [num_tokens, 1, 1]
    assert torch.equal(cache["model.samples"][2].output, cache["model.samples"].output[2])
    assert [int(token) for token in cache["model.samples"].output] == plain_tokens(model, PROMPT, 3)
    with pytest.raises(AttributeError, match="include_inputs=True"):
        _ = cache.model.layers[2].input


def test_caches_are_values_like_any_others(model: VLLM) -> None:
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            first = tracer.cache(modules=[model.layers[1]])
        with tracer.invoke(OTHER):
            kept = save({"part": tracer.cache(modules=model.layers[1:3]).model.layers[2]})
    num_first, num_second = (len(model.tokenizer.encode(text)) for text in (PROMPT, OTHER))
    assert first.model.layers[1].output.shape == (num_first, 128)
    assert kept["part"].output.shape == (num_second, 128)
    with model.trace(PROMPT, n=2, temperature=1.0, seed=3, max_tokens=2, ignore_eos=True) as tracer:
        several = tracer.cache(modules=["model.samples"])
    assert [len(one["model.samples"].output) for one in several] == [2, 2]
    with model.trace(PROMPT, **GREEDY) as tracer:
        model.layers[2].output
        late = tracer.cache()
        model.layers[3].output[:] += 1
    assert "model.model.layers.1" not in late
    assert "model.model.layers.3" in late
    assert len(late.model.layers[1]) == 0


def test_a_cache_has_whole_prompts_or_an_error(model: VLLM, local: LanguageModel) -> None:
    assert 64 < len(model.tokenizer.encode(LONG)) < 200
    with model.trace(LONG, max_tokens=2, ignore_eos=True, **GREEDY) as tracer:
        ours = tracer.cache(modules=[model.layers[2], model.layers[3].mlp, "model.logits"])
    with local.trace(LONG) as tracer:
        theirs = tracer.cache(modules=[local.layers[2], local.layers[3].mlp])
    close(ours.model.layers[2].output[0], theirs.model.layers[2].output)
    close(ours.model.layers[3].mlp.output[0], theirs.model.layers[3].mlp.output)
    assert [len(rows) for rows in ours.model.layers[2].output] == [len(model.tokenizer.encode(LONG)), 1]
    assert len(ours["model.logits"].output) == 2
    with pytest.raises(ChunkedPromptError, match="max_num_batched_tokens"):
        with model.trace(LONG, **GREEDY) as tracer:
            model.layers[1].output
            tracer.cache()


def cached(model: VLLM, modules: list[Any] | None) -> tuple[Any, str]:
    """Return a cache that is made behind the third layer, and what the trace warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(PROMPT, **GREEDY) as tracer:
            model.layers[2].output
            cache = tracer.cache(modules=modules)
    assert all(one.filename == __file__ for one in caught)
    return cache, "\n".join(str(one.message) for one in caught)


def test_a_cache_says_what_it_missed_and_why(model: VLLM) -> None:
    late = [model.layers[1], model.model.layers[0].mlp.down_proj, model.layers[3]]
    cache, said = cached(model, late)
    assert list(cache) == ["model.model.layers.3"]
    assert said.count("model.model.layers.1.output, which had run before the cache was created") == 1
    assert "model.model.layers.0.mlp.down_proj.output, which had run before" in said
    assert "layers.3" not in said
    every = [str(envoy.path) for envoy in model.modules()]
    unheard = []
    for path in every:
        cache, said = cached(model, [path])
        assert (path in cache) != (f"{path}.output, which" in said), path
        if "which did not run" in said:
            unheard.append(path)
    assert "model.lm_head" in unheard
    assert "model.model.layers.3.mlp" not in unheard
    assert not cached(model, None)[1]
    warned = pytest.warns(UserWarning, match=r"model\.model\.layers\.0\.output, which had run before")
    with warned as caught, model.trace(temperature=1.0, max_tokens=1) as tracer:
        for text in (PROMPT, OTHER):
            with tracer.invoke(text, n=2):
                _ = model.layers[2].output
                tracer.cache(modules=[model.layers[0]])
    assert len(caught) == 1


def test_a_step_that_does_not_come_ends_the_block_with_a_warning(model: VLLM) -> None:
    warned = pytest.warns(UserWarning, match="The block ends here")
    with warned, model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        steps = save([model.samples.output.item()])
        tracer.next(2)
        steps.append(model.samples.output.item())
        steps.append("unreachable")
    assert len(steps) == 1


def caching(model: VLLM, number: int) -> SentTrace:
    """Return a trace of 90 tokens with a cache, and every second one with an edit."""
    prompt = f"{OTHER} and {number}" * 3
    edits = ["push"] if number % 2 else []
    with model.trace(
        prompt, max_tokens=90, ignore_eos=True, tracer_cls=HeldTracer, edits=edits, **GREEDY
    ) as tracer:
        cache = tracer.cache(modules=[model.layers[2], "model.samples"])  # noqa: F841 - fetched by name
    sent: SentTrace = tracer.sent
    return sent


def test_preempted_requests_cache_once_and_are_edited_again(model: VLLM) -> None:
    with model.edit(name="push"):
        model.layers[1].output[:] += DIRECTION * 0.3
    with counted_recomputations(model) as counted:
        together = run_together(model, [caching(model, number) for number in range(8)])
    assert counted.num_preempted > 0
    for number in range(8):
        mine = together.outcomes[number]
        theirs = run_together(model, [caching(model, number)]).outcomes[0].saves["cache"]
        assert mine.error is None
        tokens = mine.saves["cache"]["model.samples"].output
        assert [int(token) for token in tokens] == together.tokens(f"trace-{number}")
        assert tokens == theirs["model.samples"].output
        rows = [one.model.layers[2].output for one in (mine.saves["cache"], theirs)]
        torch.testing.assert_close(*rows, rtol=1e-3, atol=1e-3)


def test_what_a_cache_cannot_do_is_said_at_its_line(model: VLLM) -> None:
    with pytest.raises(ValueError, match=r"model\.nothing"), model.trace(PROMPT) as tracer:
        tracer.cache(modules=["model.nothing"])
    with pytest.raises(ValueError, match="would stay empty"), model.trace(PROMPT) as tracer:
        tracer.cache(include_output=False)
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda") as caught:
        with model.trace(PROMPT) as tracer:
            tracer.cache(device="cuda:7")  # the line
    assert any("# the line" in str(one.line) for one in traceback.extract_tb(caught.value.__traceback__))
    with pytest.raises(TraceBytesError, match="max_trace_bytes"), model.trace(LONG) as tracer:
        tracer.cache(include_inputs=True)
    assert not model.engine.collective_rpc("count_interventions")[0]["traced"]
