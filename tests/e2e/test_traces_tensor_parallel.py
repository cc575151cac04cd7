"""Blocks over two tensor-parallel ranks: the same values as on one, and no way to set the ranks at odds.

Blocks by family run in a process of their own, see ``tensor_parallel_check``. The other tests share one
engine, whose memory is so small that requests are preempted; what is trusted and what runs in sandboxes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from benchmarks.dictionaries import random_dictionary
from nnsight_engine import save
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import SentTrace
from tests.e2e import point_blocks
from tests.e2e.check_process import report_of
from tests.e2e.harness import Engine, Reply, random_vector
from tests.e2e.point_blocks import OTHER, PROMPT
from tests.e2e.same_answers import differences_between
from tests.e2e.sandboxed import in_sandboxes
from tests.e2e.tensor_parallel_check import BLOCKS
from tests.e2e.traced_scenarios import (
    GREEDY,
    SCENARIOS,
    Scenario,
    assert_an_abort_leaves_nothing,
    assert_each_fails_alone,
    assert_generated,
    assert_same,
    ending_its_process,
    failing_at,
    generated_alone,
    named,
    still_works,
)
from tests.e2e.traces import HeldTracer, Plain, random_state, run_together, traced_engine
from tests.families.checkpoints import write_checkpoint

pytestmark = pytest.mark.e2e

_GROUPS: Final = (("llama", "qwen3"), ("gpt2", "gpt_neox"), ("gemma4",))
"""Cases that share a process. Ranks with the same keys; norms per head; a fused projection with a bias;
transformers' own modules; heads of several sizes."""
WAIT_S: Final = 0.5
"""How long a step waits for sandboxes."""
PLAYED: Final[list[Scenario]] = [
    *SCENARIOS,
    *(
        point_blocks.BLOCKS[name]
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

Report = dict[str, dict[str, str | None]]


@pytest.fixture(scope="module", params=_GROUPS, ids="-".join)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    found: Report = report_of(
        "tests.e2e.tensor_parallel_check", tmp_path_factory.mktemp("cases"), request.param
    )
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_gives_the_same_on_two_ranks(block: str, report: Report) -> None:
    failures = {case: failure for case, blocks in report.items() if (failure := blocks[block]) is not None}
    assert not failures


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_key_value_heads=1)


@pytest.fixture(scope="module")
def on_one_rank(checkpoint: Path) -> dict[str, Any]:
    """Return what one rank gives; the engine ends before another one starts."""
    with traced_engine(checkpoint, max_model_len=128, num_gpu_blocks_override=32) as model:
        found: dict[str, Any] = {"declarative": declarative(Engine.around(model.engine))}
        # A worker hears of what has finished in the next step.
        return found | {named(scenario): scenario(model) for scenario in PLAYED}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, checkpoint: Path, on_one_rank: dict[str, Any]) -> Iterator[VLLM]:
    """Start an engine of two ranks, with memory for six blocks of 32 positions, and a time for blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        # vLLM compiles how a rank looks tokens up when a block calls that first, which takes seconds.
        patch.setitem(os.environ, "TORCH_COMPILE_DISABLE", "1")
        options = {"max_model_len": 128, "block_size": 32, "num_gpu_blocks_override": 7, "max_num_seqs": 8}
        step_s = getattr(request, "param", 5.0)
        limits = EngineLimits(
            trace_step_s=step_s,
            sandbox_step_s=3.0,
            sandbox_cpu_s=60,
            sandbox_wait_s=WAIT_S,  # so that only blocks are late that are to be
        )
        with traced_engine(checkpoint, tensor_parallel_size=2, limits=limits, **options) as model:
            yield model


def declarative(engine: Engine) -> Reply:
    width = engine.spec.hidden_size
    dictionary = random_dictionary(0, width)
    changes = [{"feature": 3, "mode": "add", "value": 2.0}, {"feature": 9, "mode": "ablate"}]
    active = {"dictionary": dictionary, "feature": 5}
    vector = random_vector(0, width)
    interventions: list[dict[str, Any]] = [
        {"op": "feature", "dictionary": dictionary, "changes": changes},
        {"op": "features", "dictionary": dictionary, "top_k": 3, "name": "features"},
        {"op": "flag", "when": active, "name": "flag"},
        {"op": "steer", "at": "layers.1.output", "vector": vector, "when": {"not": active}},
        {"op": "capture", "at": ["layers.*.output", "layers.2.attn.output"], "name": "c"},
        {"op": "logit_lens", "layers": "all", "top_k": 3, "name": "lens"},
        {"op": "capture", "at": "logits", "name": "logits", "where": {"positions": [0, -1]}},
    ]
    return engine.ask("Hello there, you", interventions, max_tokens=5)


def test_two_ranks_answer_as_one(model: VLLM, on_one_rank: dict[str, Any]) -> None:
    engine, expected = Engine.around(model.engine), on_one_rank["declarative"]
    reply = declarative(engine)
    assert (reply.failure, reply.token_ids) == (None, expected.token_ids)
    assert not differences_between(reply.collected, expected.collected)
    assert 0 < len(reply.result("flag").positions) < len(reply.result("features").positions)
    # What each rank holds a part of is not offered, rather than offered wrong.
    assert engine.spec.leaf("attn.q") is None


@pytest.mark.parametrize("scenario", PLAYED, ids=named)
def test_blocks_do_on_two_ranks_what_they_do_on_one(
    model: VLLM, on_one_rank: dict[str, Any], scenario: Scenario
) -> None:
    assert_same(scenario(model), on_one_rank[named(scenario)])


# What ranks hold in common.


def test_the_block_runs_once(model: VLLM, tmp_path: Path) -> None:
    notes = str(tmp_path / "notes")
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        tokens = save([])
        for step in tracer.iter[:]:
            tokens.append(model.samples.output.item())
            with open(notes, "a") as file:
                file.write(f"{step}\n")
        result = tracer.result.save()
    assert Path(notes).read_text() == "0\n1\n2\n"
    assert tokens == list(result.outputs[0].token_ids)


def test_what_differs_between_processes_is_one_value(model: VLLM) -> None:
    with model.trace(PROMPT, **GREEDY):
        kinds = {"here", "there", "anywhere"}
        noise = save(torch.randn(len(PROMPT), 4, 32) + random.random() + np.random.rand())
        noise += hash("a string") % 7 + os.getpid() % 5 + time.time() % 1 + len(next(iter(kinds)))
        model.layers[1].attn.q = noise
        drawn = model.logits.output.save()
    with model.trace(PROMPT, **GREEDY):
        model.layers[1].attn.q = noise
        given = model.logits.output.save()
    assert torch.equal(drawn, given)


def test_ranks_sample_alike_whatever_a_block_draws(model: VLLM) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True}
    with model.trace(PROMPT, **sampling) as tracer:
        torch.manual_seed(7)
        for _ in tracer.iter[:]:
            model.layers[1].mlp.act *= torch.rand(192)
        result = tracer.result.save()
    first, second = model.engine.collective_rpc(random_state)
    assert first == second
    assert len(result.outputs[0].token_ids) == 6


def count_words(worker: Any, counts: bool) -> int:
    """Count, from now on, how often the leading rank says something; returns how often it has."""
    dispatcher = worker.model_runner.handler.traces.dispatcher
    told = dispatcher.__dict__.setdefault("told", [])
    if counts:
        ranks = dispatcher.ranks
        tell = type(ranks).broadcast
        ranks.broadcast = lambda *order: (told.append(1), tell(ranks, *order))[1]
    return len(told)


def test_plain_requests_cost_the_ranks_no_word(model: VLLM) -> None:
    model.engine.collective_rpc(count_words, args=(True,))
    params = SamplingParams(max_tokens=8, temperature=0.0)
    model.engine.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    before = model.engine.collective_rpc(count_words, args=(False,))[0]
    model.engine.generate([{"prompt_token_ids": OTHER}] * 3, params, use_tqdm=False)
    assert model.engine.collective_rpc(count_words, args=(False,))[0] == before
    with model.trace(PROMPT, **GREEDY):
        model.layers[1].attn.q.sum()
    # It came, the step began, a value was gathered and handed back, the trace was closed.
    assert model.engine.collective_rpc(count_words, args=(False,))[0] == before + 5


# Neighbours.


def test_neighbours_keep_every_bit(model: VLLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=5)
    plain = [Plain({"prompt_token_ids": OTHER}, params), Plain({"prompt_token_ids": PROMPT[:5]}, params)]
    with model.trace(PROMPT, max_tokens=6, tracer_cls=HeldTracer, **GREEDY) as idle:
        pass
    with model.trace(PROMPT, max_tokens=6, tracer_cls=HeldTracer, **GREEDY) as held:
        for _ in held.iter[:]:
            model.layers[0].attn.q[:] += 1
            model.layers[0].attn.k = model.layers[0].attn.k * 2
            model.layers[1].mlp.gate[:] = 3.0
            model.layers[2].output *= 2
            model.lm_head(model.norm(model.layers[2].output))
            model.logits.output[:, 5] += 100
    calm = run_together(model, [idle.sent], plain, late=1)
    wild = run_together(model, [held.sent], plain, late=1)
    assert wild.outcomes[0].error is None
    assert wild.tokens("trace-0") == [5] * 6
    for number in range(len(plain)):
        assert wild.logprobs(f"plain-{number}") == calm.logprobs(f"plain-{number}")


@pytest.fixture(scope="module")
def alone(model: VLLM) -> list[dict[str, Any]]:
    return generated_alone(model, 4)


def test_preempted_requests_write_again_on_every_rank(model: VLLM, alone: list[dict[str, Any]]) -> None:
    assert assert_generated(model, alone).num_preempted > 0


# Blocks that go wrong.


def at_odds(model: VLLM) -> dict[str, SentTrace]:
    """Return traces that would set the ranks at odds, by their errors."""
    options: dict[str, Any] = {"max_tokens": 8, "tracer_cls": HeldTracer, **GREEDY}
    held: dict[str, Any] = {}
    with model.trace(PROMPT, **options) as held["TimeBudgetError asleep"]:
        model.layers[1].attn.q
        time.sleep(3600)
    with model.trace(PROMPT, **options) as held["TimeBudgetError calling"]:
        while True:
            model.lm_head(torch.ones(4, 128))
    with model.trace(PROMPT, **options) as held["RuntimeError of a width"]:
        model.lm_head(torch.ones(4, 7))
    with model.trace(PROMPT, **options) as held["ValueError of columns"]:
        model.model.layers[1].self_attn.o_proj(torch.ones(4, 256))
    with model.trace(PROMPT, **options) as held["SpreadModuleError of a value"]:
        model.model.layers[1].mlp(threading)
    with model.trace(PROMPT, **options) as held["SpreadModuleError of hooks"]:
        model.model.layers[1].mlp(torch.ones(4, 128), hook=True)
    with model.trace(PROMPT, **options) as held["SpreadModuleError of hooks, later"]:
        model.layers[1].attn.q
        model.model.layers[1].mlp(torch.ones(4, 128), hook=True)
    with model.trace(PROMPT, **options) as held["SpreadModuleError of a loader"]:
        model.model.layers[1].mlp.down_proj.weight_loader(1, 2)
    with model.trace(PROMPT, **options) as held["SpreadModuleError of a source"]:
        model.model.layers[1].mlp.source.self_down_proj_0.output.sum()
    with model.trace(PROMPT, **options) as held["SpreadModuleError of a cache"]:
        model.model.layers[1].self_attn.attn.kv_cache.sum()
    with model.trace(PROMPT, **options) as held["PointValueError"]:
        model.layers[1].attn.q = torch.zeros(len(PROMPT), 2, 32)
    return {name: tracer.sent for name, tracer in held.items()}


def test_whoever_fails_fails_alone(model: VLLM) -> None:
    assert_each_fails_alone(model, failing_at(model, 1) | at_odds(model), at_once=False)


def test_a_thread_of_the_blocks_own_cannot_call_all_ranks(model: VLLM) -> None:
    with model.trace(PROMPT, **GREEDY):
        errors = save([])

        def call() -> None:
            try:
                model.model.layers[1].mlp(torch.ones(4, 128))
            except Exception as error:  # noqa: BLE001 - it is what is looked at
                errors.append(type(error).__name__)

        one = threading.Thread(target=call)
        one.start()
        one.join()
        model.layers[2].output.sum()
        model.logits.output.sum()
    assert errors == ["ValueError"]
    assert still_works(model)


def test_an_aborted_request_leaves_nothing(model: VLLM) -> None:
    assert_an_abort_leaves_nothing(model, {"traced": 1, "traces": 1})


def test_what_is_no_trace_ends_its_request_only(model: VLLM) -> None:
    for entry in ({"key": 3}, {"key": "k", "index": 0, "num_choices": 1, "data": b"\0", "groups": []}):
        params = SamplingParams(max_tokens=4, temperature=0.0, extra_args={TRACE_KEY: entry})
        model.engine.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        model.engine.collective_rpc("drop_trace", args=("k",))
    assert still_works(model)


# In sandboxes.


patient = pytest.mark.parametrize("model", [60.0], indirect=True, scope="module", ids=["patient"])
"""With an engine of their own, whose blocks have the time that processes take on a busy machine."""


@patient
@pytest.mark.heavy
@pytest.mark.parametrize("scenario", PLAYED, ids=named)
def test_sandboxed_blocks_do_on_two_ranks_what_trusted_ones_do_on_one(
    model: VLLM, on_one_rank: dict[str, Any], scenario: Scenario
) -> None:
    with in_sandboxes(model):
        found = scenario(model)
    assert_same(found, on_one_rank[named(scenario)])


def at_odds_in_sandboxes(model: VLLM) -> dict[str, SentTrace]:
    options: dict[str, Any] = {"max_tokens": 8, "tracer_cls": HeldTracer, **GREEDY}
    held: dict[str, Any] = {}
    with model.trace(PROMPT, **options) as held["TimeBudgetError SandboxEndedError SandboxedError"]:
        while True:
            model.lm_head(torch.ones(4, 128))
    with model.trace(PROMPT, **options) as held["SandboxedError of a width"]:
        model.lm_head(torch.ones(4, 7))
    with model.trace(PROMPT, **options) as held["SandboxedError of a weight"]:
        model.model.layers[1].mlp.down_proj.weight.sum()
    with model.trace(PROMPT, **options) as held["PointValueError"]:
        model.layers[1].attn.q = torch.zeros(len(PROMPT), 2, 32)
    return {name: tracer.sent for name, tracer in held.items()}


@patient
@pytest.mark.heavy
def test_sandboxed_blocks_that_fail_fail_alone(model: VLLM) -> None:
    with in_sandboxes(model):
        failing = failing_at(model, 1) | ending_its_process(model, 1) | at_odds_in_sandboxes(model)
        assert_each_fails_alone(model, failing, at_once=False)


@patient
@pytest.mark.heavy
def test_preempted_and_deferred_blocks_see_each_step_once(model: VLLM, alone: list[dict[str, Any]]) -> None:
    with in_sandboxes(model):
        counted = assert_generated(model, alone, busy_s=1.5 * WAIT_S)
    assert counted.num_preempted > 0
    assert counted.num_undone > 0


@patient
@pytest.mark.heavy
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


@patient
@pytest.mark.heavy
def test_an_aborted_request_of_a_sandbox_leaves_nothing(model: VLLM) -> None:
    with in_sandboxes(model):
        assert_an_abort_leaves_nothing(model, {"sandboxes": 1, "traces": 1})
