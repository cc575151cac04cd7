"""Taps inside the compiled step: interventions work there, and neighbours do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from nnsight_engine import save
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.harness import Engine, Reply
from tests.e2e.neighbours import INTERVENTIONS, PROMPTS, asks, assert_neighbours_notice_nothing
from tests.e2e.traces import HeldTracer, Plain, run_together, traced_engine

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

TAPPED = ["steer at one layer", "steer at all layers", "capture everywhere", "lens", "logits"]


@pytest.fixture(scope="module")
def model(narrow: Path) -> Iterator[VLLM]:
    """Serve with inductor, as ``--compile`` does."""
    options = {"enforce_eager": False, "enable_prefix_caching": False, "max_num_seqs": 64}
    with traced_engine(narrow, dtype="auto", **options) as model:
        yield model


@pytest.fixture(scope="module")
def engine(model: VLLM) -> Engine:
    return Engine.around(model.engine)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Reply]:
    return [reply for (reply,) in engine.run(asks([]))]


@pytest.mark.parametrize("name", TAPPED)
def test_seven_neighbours_are_bit_identical(engine: Engine, plain: list[Reply], name: str) -> None:
    own = assert_neighbours_notice_nothing(engine, plain, name)
    assert own.collected is not None
    assert own.collected.tier == "tap"


def test_points_inside_a_block_run_that_step_uncompiled(engine: Engine) -> None:
    reply = engine.ask(PROMPTS[0], INTERVENTIONS["hooks"], max_tokens=4)
    assert reply.failure is None
    assert reply.collected is not None
    assert reply.collected.tier == "eager"
    assert reply.result("capture_1").positions == list(range(len(engine.token_ids(PROMPTS[0])) + 3))


def test_seven_neighbours_of_a_block_at_the_taps_are_bit_identical(model: VLLM) -> None:
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}
    with model.trace(PROMPTS[0], tracer_cls=HeldTracer, **greedy) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            rows.append(model.layers[3].output)
            model.layers[5].output[:, :100] *= 3
            model.layers[10].input = model.layers[10].input * 1.5
            rows.append(model.norm.input)
            model.logits.output[:, 1000:] = -1e4
            rows.append(model.samples.output)
    neighbours = [Plain(prompt, SamplingParams(logprobs=5, **greedy)) for prompt in PROMPTS[1:]]
    idle = Plain(PROMPTS[0], SamplingParams(**greedy))
    quiet = run_together(model, [], [*neighbours, idle])
    ran = run_together(model, [tracer.sent], neighbours)
    assert ran.outcomes[0].error is None
    tokens = ran.tokens("trace-0")
    assert tokens != quiet.tokens(f"plain-{len(neighbours)}")
    assert max(tokens) < 1000
    assert [one.item() for one in ran.outcomes[0].saves["rows"][2::3]] == tokens
    for name in (f"plain-{number}" for number in range(len(neighbours))):
        before, after = (one.outputs[name].outputs[0] for one in (quiet, ran))
        assert after.token_ids == before.token_ids
        assert after.logprobs == before.logprobs
