"""Blocks over two tensor-parallel ranks: the same values as on one, and no way to set the ranks at odds.

Blocks by family run in a process of their own, see ``tensor_parallel_check``. The other tests share one
engine, whose memory is so small that requests are preempted.
"""

from __future__ import annotations

import functools
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
from nnsight_engine.interleaving.threads import TimeBudgetError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.request_tracer import SentTrace
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY
from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.check_process import report_of
from tests.e2e.harness import Engine, Reply, random_vector
from tests.e2e.point_blocks import OTHER, PROMPT
from tests.e2e.tensor_parallel_check import BLOCKS
from tests.e2e.traces import (
    HeldTracer,
    Plain,
    errors_beside,
    live_objects,
    random_state,
    run_and_abort,
    run_together,
    traced_engine,
)
from tests.families.checkpoints import write_checkpoint

pytestmark = pytest.mark.e2e

_GROUPS: Final = (("llama", "qwen3"), ("gpt2", "gpt_neox"), ("gemma4",))
"""Cases that share a process. Ranks with the same keys; norms per head; a fused projection with a bias;
transformers' own modules; heads of several sizes."""

GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}
_BUDGET_S: Final = 1.0

Report = dict[str, dict[str, str | None]]


@pytest.fixture(scope="module", params=_GROUPS, ids="-".join)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Run the blocks of a group of cases."""
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
def on_one_rank(checkpoint: Path) -> Reply:
    """Return what one rank answers; the engine ends before another one starts."""
    engine = Engine(checkpoint, dtype="float32", max_model_len=128, num_gpu_blocks_override=32)
    try:
        return declarative(engine)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def model(checkpoint: Path, on_one_rank: Reply) -> Iterator[VLLM]:
    """Start an engine of two ranks, with memory for six blocks of 32 positions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        options = {
            "max_model_len": 128,
            "block_size": 32,
            "num_gpu_blocks_override": 7,
            "max_num_seqs": 8,
        }
        limits = EngineLimits(trace_step_s=_BUDGET_S)
        with traced_engine(checkpoint, tensor_parallel_size=2, limits=limits, **options) as model:
            yield model


def still_works(model: VLLM) -> bool:
    """Tell whether a block is served as it should be."""
    with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        queries = model.layers[1].attn.q.shape.save()
        lens = model.lm_head(model.norm(model.layers[2].output)).save()
        tokens = save([])
        for _ in tracer.iter[:]:
            tokens.append(model.samples.output.item())
    return tuple(queries) == (len(PROMPT), 4, 32) and lens.shape == (len(PROMPT), 319) and len(tokens) == 2


def declarative(engine: Engine) -> Reply:
    """Ask for operations of many kinds."""
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


def test_two_ranks_answer_as_one(model: VLLM, on_one_rank: Reply) -> None:
    engine, expected = Engine.around(model.engine), on_one_rank
    reply = declarative(engine)
    assert reply.failure is None
    assert reply.token_ids == expected.token_ids
    for point in ("layers.0.output", "layers.3.output", "layers.2.attn.output"):
        torch.testing.assert_close(
            reply.tensor("c", point), expected.tensor("c", point), rtol=1e-3, atol=1e-4
        )
    torch.testing.assert_close(
        reply.tensor("logits", "logits"), expected.tensor("logits", "logits"), rtol=1e-3, atol=1e-4
    )
    found: list[Any] = [one.result("features") for one in (reply, expected)]
    ids, activations = (
        [[[pair[part] for pair in row] for row in one.rows] for one in found] for part in (0, 1)
    )
    assert ids[0] == ids[1]
    torch.testing.assert_close(
        torch.tensor(activations[0]), torch.tensor(activations[1]), rtol=1e-3, atol=1e-4
    )
    assert found[0].positions == found[1].positions
    flagged = reply.result("flag").positions
    assert flagged == expected.result("flag").positions
    assert 0 < len(flagged) < len(found[0].positions)
    assert reply.result("lens").positions == expected.result("lens").positions
    # What each rank holds a part of is not offered, rather than offered wrong.
    assert engine.spec.leaf("attn.q") is None


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
        ranks = dispatcher.spread.ranks
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
    assert wild.tokens("trace-0") == [5] * 6
    for number in range(len(plain)):
        assert wild.logprobs(f"plain-{number}") == calm.logprobs(f"plain-{number}")


def generating(model: VLLM, number: int) -> SentTrace:
    """Return a trace that writes what is spread over ranks, and reads, at each of 50 tokens."""
    prompt = [(token + number) % 319 for token in PROMPT]
    direction = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
    with model.trace(prompt, max_tokens=50, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows, tokens = save([]), save([])
        for _ in tracer.iter[:]:
            model.layers[1].attn.heads[:] += direction
            rows.append(model.layers[2].attn.k)
            tokens.append(model.samples.output.item())
    sent: SentTrace = tracer.sent
    return sent


def test_preempted_requests_write_again_on_every_rank(model: VLLM) -> None:
    together = run_together(model, [generating(model, number) for number in range(4)])
    assert together.num_steps > 60, "nothing was preempted, so nothing was shown"
    for number in range(4):
        alone = run_together(model, [generating(model, number)]).outcomes[0]
        mine = together.outcomes[number]
        assert mine.error is None
        assert mine.saves["tokens"] == alone.saves["tokens"]
        for one, other in zip(mine.saves["rows"], alone.saves["rows"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


# Blocks that go wrong.


def failing(model: VLLM) -> list[SentTrace]:
    """Return traces that end badly, each in its own way."""
    opened = functools.partial(model.trace, PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY)
    held = []
    with opened() as tracer:
        model.layers[1].attn.q
        raise KeyError("mine")
    held.append(tracer)
    with opened() as tracer:
        model.layers[1].attn.q
        while True:
            pass
    held.append(tracer)
    with opened() as tracer:
        model.layers[1].attn.q
        time.sleep(3600)
    held.append(tracer)
    with opened() as tracer:
        while True:
            model.lm_head(torch.ones(4, 128))
    held.append(tracer)
    with opened() as tracer:
        model.lm_head(torch.ones(4, 7))
    held.append(tracer)
    with opened() as tracer:
        model.model.layers[1].self_attn.o_proj(torch.ones(4, 256))
    held.append(tracer)
    with opened() as tracer:
        model.model.layers[1].mlp(threading)
    held.append(tracer)
    with opened() as tracer:
        model.model.layers[1].mlp(torch.ones(4, 128), hook=True)
    held.append(tracer)
    with opened() as tracer:
        model.layers[1].attn.q
        model.model.layers[1].mlp(torch.ones(4, 128), hook=True)
    held.append(tracer)
    with opened() as tracer:
        model.model.layers[1].mlp.down_proj.weight_loader(1, 2)
    held.append(tracer)
    with opened() as tracer:
        model.model.layers[1].mlp.source.self_down_proj_0.output.sum()
    held.append(tracer)
    with opened() as tracer:
        model.model.layers[1].self_attn.attn.kv_cache.sum()
    held.append(tracer)
    with opened() as tracer:
        model.layers[1].attn.q = torch.zeros(len(PROMPT), 2, 32)
    held.append(tracer)
    return [tracer.sent for tracer in held]


def test_whoever_fails_fails_alone(model: VLLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5)
    plain = [Plain({"prompt_token_ids": OTHER}, params)]
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as idle:
        pass
    found = errors_beside(model, idle.sent, failing(model), plain)
    names = [type(error).__name__ for error in found]
    assert names[:4] == ["KeyError", *[TimeBudgetError.__name__] * 3]
    assert names[4:6] == ["RuntimeError", "ValueError"]
    assert "128 columns" in str(found[5])
    assert names[6:12] == [SpreadModuleError.__name__] * 6
    assert names[12] == "PointValueError"
    assert still_works(model)


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


def test_a_block_that_stops_ends_its_request(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=8, **GREEDY) as tracer:
        queries = model.layers[1].attn.q.save()
        tracer.stop()
    assert queries.shape == (len(PROMPT), 4, 32)
    assert still_works(model)


def test_an_aborted_request_leaves_nothing(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=100, tracer_cls=HeldTracer, **GREEDY) as held:
        for _ in held.iter[:]:
            model.layers[1].attn.q[:] = 0
    assert run_and_abort(model, held.sent, num_tokens=4) == {"traced": 1, "traces": 1}
    assert not live_objects(model)
    assert still_works(model)


def test_what_is_no_trace_ends_its_request_only(model: VLLM) -> None:
    for entry in ({"key": 3}, {"key": "k", "index": 0, "num_choices": 1, "data": b"\0", "groups": []}):
        params = SamplingParams(max_tokens=4, temperature=0.0, extra_args={TRACE_KEY: entry})
        model.engine.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        model.engine.collective_rpc("drop_trace", args=("k",))
    assert still_works(model)


def test_choices_run_a_block_each(model: VLLM) -> None:
    with model.trace(PROMPT, n=2, temperature=1.0, max_tokens=3, ignore_eos=True) as tracer:
        tokens = save([])
        for _ in tracer.iter[:]:
            model.layers[1].attn.v[:] *= 1.5
            tokens.append(model.samples.output.item())
        result = tracer.result.save()
    assert [list(choice.token_ids) for choice in result[0].outputs] == tokens
