"""Two tenants in one engine, one of whom floods it: the other's first token, and everybody's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override
from vllm.v1.core.sched.interface import PauseState

from nnsight_engine import save
from nnsight_engine.plans.collect.results import CollectedLens
from nnsight_engine.vllm_backend.fair_scheduler import SENDER_KEY, SenderUsage
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import SentTrace
from tests.e2e.harness import Ask, Engine, random_vector
from tests.e2e.traces import HeldTracer, collected, finished, traced_engine

pytestmark = pytest.mark.e2e

MANY: dict[str, Any] = {"extra_args": {SENDER_KEY: "many"}}
FEW: dict[str, Any] = {"extra_args": {SENDER_KEY: "few"}}
LENS = {"op": "logit_lens", "name": "l", "top_k": 1}
PROMPT = "It was a dark and stormy night. "
LARGE = PROMPT * 40
"""More blocks than are free beside four others."""

NUM_PLACES = 4


class Settled(SenderUsage):
    """Knows by itself who floods: how long steps take on a test's machine says nothing."""

    @override
    def light_senders(self) -> frozenset[str]:
        return frozenset({"few"})


@pytest.fixture(scope="module")
def model(narrow: Path) -> Iterator[VLLM]:
    """Start an engine with four places, and memory for 15 blocks of 32 tokens."""
    options = {"max_num_seqs": NUM_PLACES, "block_size": 32, "num_gpu_blocks_override": 16}
    with traced_engine(narrow, max_model_len=384, **options) as model:
        core: Any = model.engine.llm_engine.engine_core
        core.engine_core.scheduler.sharing = Settled(3600.0, 1.25)
        yield model


@pytest.fixture
def engine(model: VLLM) -> Iterator[Engine]:
    engine = Engine.around(model.engine)
    yield engine
    held = engine.held()
    assert not any(held.values()), held


def flooding(index: int, sampling: dict[str, Any]) -> Ask:
    """Return the index-th request of a flood, which reads, and every second one writes; of 2 or 3 blocks."""
    interventions: list[dict[str, Any]] = [{"op": "capture", "at": ["layers.20.output"], "name": "c"}]
    if index % 2 == 0:
        steer = {"op": "steer", "at": "layers.5.output", "vector": random_vector(index), "scale": 0.5}
        interventions = [steer, *interventions]
    return Ask(f"Story number {index}. {PROMPT * 6}", interventions, max_tokens=30, sampling=sampling)


def steps_to_the_end(engine: Engine, request_id: str, done: dict[str, Any]) -> int:
    """Return after how many steps a request ends, beside the one that is under way when it arrives."""
    for count in range(2000):
        done |= engine.step()
        if request_id in done:
            return count
    raise AssertionError("it does not end")


def test_a_first_token_comes_at_once_though_places_and_memory_are_taken(engine: Engine) -> None:
    flood = [flooding(index, MANY) for index in range(40)]
    pending = [engine.submit(ask) for ask in flood]
    done: dict[str, Any] = {}
    for _ in range(20):
        done |= engine.step()
    small = engine.submit(Ask("The", max_tokens=1, sampling=FEW))
    assert steps_to_the_end(engine, small.request_id, done) == 1
    long = engine.submit(Ask("The", max_tokens=30, sampling=FEW))
    assert steps_to_the_end(engine, long.request_id, done) == 30
    large = engine.submit(Ask(LARGE, max_tokens=1, sampling=FEW))
    assert steps_to_the_end(engine, large.request_id, done) == 1
    while engine.core.has_unfinished_requests():
        done |= engine.step()
    (answered,) = engine.replies(large, done[large.request_id])
    assert answered.token_ids == engine.ask(LARGE, max_tokens=1).token_ids
    recomputed = 0
    for index, entry in enumerate(pending):
        (mine,) = engine.replies(entry, done[entry.request_id])
        assert mine.collected is not None
        recomputed += mine.collected.recomputed_tokens
        if index > 2 and not mine.collected.recomputed_tokens:
            continue
        ((alone,),) = engine.run([flooding(index, {})])
        assert mine.token_ids == alone.token_ids
        assert mine.result("c").positions == alone.result("c").positions
        ours, theirs = mine.tensor("c", "layers.20.output"), alone.tensor("c", "layers.20.output")
        scale = theirs.abs().amax(dim=-1, keepdim=True)
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=1e-3, atol=1e-3)
    assert recomputed > 0, "there was memory left, so nothing was shown"


def test_nothing_is_preempted_for_what_a_paused_engine_does_not_start(engine: Engine) -> None:
    pending = [engine.submit(flooding(index, MANY)) for index in range(NUM_PLACES)]
    for _ in range(5):
        engine.core.step()
    core: Any = engine.core.engine_core
    core.engine_core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    large = engine.submit(Ask(LARGE, max_tokens=1, sampling=FEW))
    done: dict[str, Any] = {}
    for _ in range(40):
        done |= engine.step()
    assert done.keys() == {entry.request_id for entry in pending}
    core.engine_core.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert steps_to_the_end(engine, large.request_id, done) == 1
    for index, entry in enumerate(pending):
        (mine,) = engine.replies(entry, done[entry.request_id])
        assert mine.collected is not None
        assert not mine.collected.recomputed_tokens
        ((alone,),) = engine.run([flooding(index, {})])
        assert mine.token_ids == alone.token_ids
    engine.replies(large, done[large.request_id])


def test_requests_with_much_work_take_turns_and_delay_nobody(engine: Engine) -> None:
    """Lenses of all layers and of long prompts, beside a request that gets a token in every step."""
    scheduler: Any = engine.core.engine_core.engine_core.scheduler
    asks = [Ask(f"Story number {index}. {PROMPT * 6}", [LENS], 2, FEW) for index in range(3)]
    plain = engine.submit(Ask("The", max_tokens=60, sampling=FEW))
    done: dict[str, Any] = dict(engine.step())
    costly = [engine.submit(ask) for ask in asks]
    works: list[float] = []
    while plain.request_id not in done:
        done |= engine.step()
        works.append(scheduler.work.used)
    assert len(works) == 60  # with the first one, and one that was under way
    while engine.core.has_unfinished_requests():  # beside a plain one, the others rest between their steps
        done |= engine.step()
        works.append(scheduler.work.used)
    assert max(works) <= scheduler.work.limit
    assert sum(used > 0 for used in works) > 2 * len(asks)
    engine.replies(plain, done[plain.request_id])
    for ask, entry in zip(asks, costly, strict=True):
        (mine,) = engine.replies(entry, done[entry.request_id])
        ((alone,),) = engine.run([ask])
        assert mine.token_ids == alone.token_ids
        ours, theirs = mine.result("l"), alone.result("l")
        assert isinstance(ours, CollectedLens)
        assert isinstance(theirs, CollectedLens)
        for layer, rows in ours.layers.items():
            np.testing.assert_allclose(rows.logprobs, theirs.layers[layer].logprobs, rtol=1e-3, atol=1e-3)


def traced(model: VLLM, number: int) -> SentTrace:
    """Return a trace that needs its prompt whole, and reads at each of 50 tokens."""
    prompt = f"Story number {number}. {PROMPT * 2}"
    with model.trace(
        prompt, max_tokens=50, ignore_eos=True, temperature=0.0, tracer_cls=HeldTracer
    ) as tracer:
        first = save(model.model.layers[3].mlp.output)  # noqa: F841 - fetched by name
        second = save(model.model.layers[5].mlp.output)  # noqa: F841 - the same
        tokens = save([])
        for _ in tracer.iter[:]:
            tokens.append(model.samples.output.item())
    sent: SentTrace = tracer.sent
    return sent


def test_a_flood_of_traces_gets_its_turns_and_keeps_its_prompts_whole(model: VLLM, engine: Engine) -> None:
    traces = [traced(model, number) for number in range(8)]
    for number, one in enumerate(traces):
        (params,) = one.params
        params.extra_args = {**(params.extra_args or {}), **MANY["extra_args"]}
        engine.core.add_request(f"trace-{number}", one.prompts[0], params)
    done: dict[str, Any] = {}
    for count in range(2000):
        if count % 5 == 0:  # the other one has always something to do
            engine.submit(Ask("The", max_tokens=4, sampling=FEW))
        done |= engine.step()
        if all(f"trace-{number}" in done for number in range(8)):
            break
    while engine.core.has_unfinished_requests():
        engine.core.step()
    for number, one in enumerate(traces):
        outcome = collected(model, one, [done[f"trace-{number}"]])
        assert outcome.error is None
        length = len(model.tokenizer.encode(f"Story number {number}. {PROMPT * 2}"))
        assert len(outcome.saves["first"]) == len(outcome.saves["second"]) == length
        assert outcome.saves["tokens"] == list(done[f"trace-{number}"].outputs[0].token_ids)


@pytest.mark.timeout(120)  # vLLM's step would not end
def test_a_light_request_that_cannot_start_keeps_nobody_waiting(model: VLLM, engine: Engine) -> None:
    """The first request of a trace with two waits for the second, and the flood goes on meanwhile."""
    with model.trace(max_tokens=2, temperature=0.0, tracer_cls=HeldTracer) as tracer:
        with tracer.invoke("The"):
            first = save(model.samples.output)  # noqa: F841 - fetched by name
        with tracer.invoke("Once"):
            second = save(model.samples.output)  # noqa: F841 - the same
    sent: SentTrace = tracer.sent
    for params in sent.params:
        params.extra_args = {**(params.extra_args or {}), **FEW["extra_args"]}
    flood = engine.submit(flooding(0, MANY))
    engine.core.add_request("trace-0", sent.prompts[0], sent.params[0])
    done: dict[str, Any] = {}
    for _ in range(100):  # it takes every second one
        done |= engine.step()
    engine.replies(flood, done[flood.request_id])
    engine.core.add_request("trace-1", sent.prompts[1], sent.params[1])
    while engine.core.has_unfinished_requests():
        done |= engine.step()
    outcomes = finished(model, sent, [done["trace-0"], done["trace-1"]])
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [[*outcome.saves] for outcome in outcomes] == [["first"], ["second"]]


def test_one_tenant_alone_takes_as_many_steps_as_none(engine: Engine) -> None:
    counts = []
    for sampling in (MANY, {}):
        pending = [engine.submit(flooding(index, sampling)) for index in range(6)]
        done: dict[str, Any] = {}
        count = 0
        while engine.core.has_unfinished_requests():
            done |= engine.step()
            count += 1
        counts.append(count)
        for entry in pending:
            engine.replies(entry, done[entry.request_id])
    assert counts[0] == counts[1]


def test_aborted_requests_are_charged_for_their_steps(model: VLLM, engine: Engine) -> None:
    core: Any = model.engine.llm_engine.engine_core.engine_core
    settled, core.scheduler.sharing = core.scheduler.sharing, SenderUsage(3600.0, 1.25, lambda: 0.0)
    try:
        light = frozenset({"many", "few"})
        for _ in range(200):
            engine.submit(Ask("The", max_tokens=1, sampling=FEW))
            large = engine.submit(Ask(LARGE, max_tokens=1, sampling=MANY))
            (known,) = [one for one in core.scheduler.requests if one.startswith(large.request_id)]
            core.aborts_queue.put([known])  # which the engine looks at when its step is over
            engine.core.step()
            assert known not in core.scheduler.requests
            engine.core.abort_request([large.request_id])
            while engine.core.has_unfinished_requests():
                engine.core.step()
            light = core.scheduler.sharing.light_senders()
            if len(light) < 2:
                break
        assert light == {"few"}
    finally:
        core.scheduler.sharing = settled
