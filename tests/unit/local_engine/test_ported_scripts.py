"""What scripts written for nnsight say, on a model here and sent to the local engine: the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine.core.saves import save
from nnsight_engine.local_engine.serving import _print_warning
from tests.unit.local_engine.bench import TEXT, Bench

GENERATION: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}


def test_a_cache_of_everything_comes_home_with_inputs_by_step(bench: Bench) -> None:
    found = []
    for model, how in bench.ways:
        with model.generate(TEXT, **GENERATION, **how) as tracer:
            cache = tracer.cache()
        steps = [(step.input, step.output) for step in cache.model.lm_head]
        assert len(cache["model.lm_head"]) == len(steps) == 3
        assert torch.equal(cache["model.model.layers"][1].output[2], cache.model.model.layers[1][2].output)
        found.append((steps, cache["model.model.layers.0.mlp"][1].input, set(cache)))
        del cache
    (here, given, paths), (there, sent, sent_paths) = found
    for (input_, output), (input_sent, output_sent) in zip(here, there, strict=True):
        assert torch.equal(input_, input_sent)
        assert torch.equal(output, output_sent)
    assert torch.equal(given, sent)
    assert paths == sent_paths


@pytest.mark.filterwarnings("ignore:`with tracer.iter:DeprecationWarning")
def test_older_loops_and_traces_that_generate(bench: Bench) -> None:
    found = []
    for model, how in bench.ways:
        with model.trace(TEXT, **GENERATION, **how) as tracer:
            tokens = save(list[Any]())
            with tracer.iter[1:] as step:
                tokens.append((step, model.lm_head.output[0, -1].argmax().item()))
            result = tracer.result.save()
        found.append((tokens, result.tolist()))
    assert found[0] == found[1]
    assert [step for step, _ in found[0][0]] == [1, 2]


def test_gradients_asked_for_by_assignment(bench: Bench) -> None:
    found = []
    for model, how in bench.ways:
        with model.trace(TEXT, **how):
            hidden = model.model.layers[0].output
            hidden.requires_grad = True
            with model.lm_head.output.sum().backward():
                gradient = hidden.grad.save()
        found.append(gradient)
    assert torch.equal(*found)
    assert found[0].any()


def test_sources_of_operations(bench: Bench) -> None:
    found = []
    for model, how in bench.ways:
        with model.trace(TEXT, **how):
            inner = model.model.layers[0].self_attn.source.attention_interface_0.source
            value = inner.contiguous_0.output.save()
        found.append(value)
    assert torch.equal(*found)


def test_a_stop_that_the_block_catches(bench: Bench) -> None:
    for model, how in bench.ways:
        with model.trace(TEXT, **how) as tracer:
            seen = save(list[Any]())
            model.model.layers[0].output.sum()
            try:
                tracer.stop()
            except Exception:  # noqa: BLE001 - the subject
                seen.append("caught")
            model.lm_head.output.sum()
            seen.append("not reached")
        assert seen == ["caught"]


def test_warnings_of_blocks_go_where_their_prints_go(capsys: pytest.CaptureFixture[str]) -> None:
    _print_warning(UserWarning("no further step comes"), UserWarning, "script.py", 7)
    assert capsys.readouterr().out == "script.py:7: UserWarning: no further step comes\n"
