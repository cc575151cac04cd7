"""Sandboxed blocks over two tensor-parallel ranks: the values of trusted ones, and no effect on others."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from vllm import SamplingParams

from nnsight_engine import save
from nnsight_engine.interleaving.threads import TimeBudgetError
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.request_tracer import SentTrace
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.point_blocks import BLOCKS, OTHER, PROMPT
from tests.e2e.sandboxed import in_sandboxes
from tests.e2e.traces import (
    HeldTracer,
    Plain,
    counted_recomputations,
    errors_beside,
    live_objects,
    random_state,
    run_and_abort,
    run_together,
    traced_engine,
)
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}
_MAX_STEPS: Final = 20_000
Scenario = Callable[[VLLM], dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    """Start an engine of two ranks, with memory for six blocks of 32 positions."""
    checkpoint = write_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_key_value_heads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        options = {"max_model_len": 128, "block_size": 32, "num_gpu_blocks_override": 7, "max_num_seqs": 8}
        limits = EngineLimits(trace_step_s=60.0, sandbox_step_s=1.0, sandbox_cpu_s=60)
        with traced_engine(checkpoint, tensor_parallel_size=2, limits=limits, **options) as model:
            yield model


def modules_called(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, **GREEDY):
        token = model.model.embed_tokens(torch.tensor([9])).save()
        hidden = model.layers[1].output
        mlp = model.model.layers[1].mlp(hidden).save()
        down = save(model.model.layers[1].mlp.down_proj(torch.ones(3, 192))[0])
        lens = model.lm_head(model.norm(hidden)).save()
        logits = model.logits.output.save()
    return {"token": token, "mlp": mlp, "down": down, "lens": lens, "logits": logits}


def tokens_chosen(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
        model.samples.output = torch.tensor([[7]])
        queries = model.next().layers[1].attn.q.clone().save()
        model.logits.output[:] = torch.nn.functional.one_hot(torch.tensor([9]), 319) * 100.0
        result = tracer.result.save()
    tokens = list(result.outputs[0].token_ids)
    assert tokens[:2] == [7, 9]
    return {"tokens": tokens, "queries": queries}


def several_choices(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, n=2, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True) as tracer:
        tokens = save([])
        for _ in tracer.iter[:]:
            model.layers[1].attn.v[:] *= 1.5
            tokens.append(model.samples.output.item())
        result = tracer.result.save()
    assert [list(choice.token_ids) for choice in result[0].outputs] == tokens
    return {"tokens": tokens}


def a_cache(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, **GREEDY) as tracer:
        cache = tracer.cache(modules=[model.model.layers[1].mlp.gate_up_proj, model.model.layers[2].mlp])
    return {name: entry.output for name, entry in cache.items()}


def a_block_that_stops(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, max_tokens=50, **GREEDY) as tracer:
        queries = model.layers[1].attn.q.save()
        tracer.stop()
    return {"queries": queries}


SCENARIOS: Final[list[Scenario]] = [
    modules_called,
    tokens_chosen,
    several_choices,
    a_cache,
    a_block_that_stops,
    *(
        BLOCKS[name]
        for name in (
            "read_by_attribute",
            "ablate_a_head",
            "patch_from_another_prompt",
            "patch_between_invokes",
            "steer_while_generating",
            "skip_a_layer",
            "look_through_a_lens",
        )
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_sandboxed_blocks_give_what_trusted_ones_give(model: VLLM, scenario: Scenario) -> None:
    expected = scenario(model)
    with in_sandboxes(model):
        found = scenario(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def failing(model: VLLM) -> list[SentTrace]:
    """Return traces that end badly, each in its own way."""
    opened = functools.partial(model.trace, PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY)
    held = []
    with opened() as tracer:
        model.layers[1].attn.q.sum()
        raise KeyError("mine")
    held.append(tracer)
    with opened() as tracer:
        model.layers[1].attn.q.sum()
        while True:
            pass
    held.append(tracer)
    with opened() as tracer:
        model.layers[1].attn.q.sum()
        exec("import os; os._exit(0)")
    held.append(tracer)
    with opened() as tracer:
        while True:
            model.lm_head(torch.ones(4, 128))
    held.append(tracer)
    with opened() as tracer:
        model.lm_head(torch.ones(4, 7))
    held.append(tracer)
    with opened() as tracer:
        model.model.layers[1].mlp.down_proj.weight.sum()
    held.append(tracer)
    with opened() as tracer:
        model.layers[1].attn.q = torch.zeros(len(PROMPT), 2, 32)
    held.append(tracer)
    return [tracer.sent for tracer in held]


def test_blocks_that_fail_fail_alone(model: VLLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5)
    plain = [Plain({"prompt_token_ids": OTHER}, params)]
    with in_sandboxes(model):
        with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as idle:
            pass
        found = errors_beside(model, idle.sent, failing(model), plain, _MAX_STEPS)
    endless = (TimeBudgetError, SandboxEndedError, SandboxedError)
    assert [type(error).__name__ for error in found if not isinstance(error, endless)] == [
        "KeyError",
        "PointValueError",
    ]
    assert isinstance(found[2], SandboxEndedError)
    assert all(isinstance(error, SandboxedError) for error in found[4:6])
    with in_sandboxes(model):
        assert set(modules_called(model)) == {"token", "mlp", "down", "lens", "logits"}


def generating(model: VLLM, number: int, busy_s: float = 0.0) -> SentTrace:
    """Return a trace that writes what is spread over ranks, and reads, at each of 50 tokens.

    Args:
        model: The engine.
        number: Which one.
        busy_s: How long the block computes at the third token, between the write and the read.
    """
    prompt = [(token + number) % 319 for token in PROMPT * 8]  # with its tokens, four blocks of six
    direction = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
    with model.trace(prompt, max_tokens=50, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows, tokens = save([]), save([])
        for step in tracer.iter[:]:
            model.layers[1].attn.heads[:] += direction
            end = time.process_time() + busy_s
            while step == 2 and time.process_time() < end:
                pass
            rows.append(model.layers[2].attn.k)
            tokens.append(model.samples.output.item())
    sent: SentTrace = tracer.sent
    return sent


def test_preempted_and_deferred_blocks_see_each_step_once(model: VLLM) -> None:
    expected = [run_together(model, [generating(model, number)]).outcomes[0] for number in range(4)]
    with in_sandboxes(model), counted_recomputations(model) as counted:
        sent = [generating(model, number, busy_s=0.2) for number in range(4)]  # longer than a step waits
        together = run_together(model, sent, max_steps=_MAX_STEPS)
    assert counted.num_preempted > 0
    assert counted.num_undone > 0
    for number, alone in enumerate(expected):
        mine = together.outcomes[number]
        assert mine.error is None
        assert mine.saves["tokens"] == alone.saves["tokens"] == together.tokens(f"trace-{number}")
        torch.testing.assert_close(mine.saves["rows"], alone.saves["rows"], rtol=1e-3, atol=1e-3)


def test_ranks_sample_alike_when_a_step_goes_on_without_a_block(model: VLLM) -> None:
    def sampled() -> list[int]:
        with model.trace(PROMPT, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                model.layers[1].mlp.act *= 1.5
                end = time.process_time() + 0.2  # longer than a step waits
                while time.process_time() < end:
                    pass
                model.samples.output.item()
            result = tracer.result.save()
        return list(result.outputs[0].token_ids)

    expected = sampled()
    with in_sandboxes(model):
        assert sampled() == expected
    first, second = model.engine.collective_rpc(random_state)
    assert first == second


def test_an_aborted_request_leaves_nothing(model: VLLM) -> None:
    with in_sandboxes(model):
        with model.trace(PROMPT, max_tokens=100, tracer_cls=HeldTracer, **GREEDY) as held:
            for _ in held.iter[:]:
                model.layers[1].attn.q[:] = 0
        assert run_and_abort(model, held.sent, num_tokens=4) == {"sandboxes": 1, "traces": 1}
    assert not live_objects(model)
