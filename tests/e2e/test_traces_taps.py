"""Blocks served at the taps, and steps that are run again because a block goes on to want more.

Each block has a twin that asks for something inside the first layer before all else, so that its steps run
with modules heard of from the start: what both find must be the same. The engine compiles its graph, and runs
it with torch's own kernels, in float32: an uncompiled step differs in rounding alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nnsight_engine import save
from nnsight_engine.interleaving.events import OutOfOrderError
from nnsight_engine.remote_backend.values.outcomes import Outcome
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.harness import Ask, Engine, random_vector
from tests.e2e.traces import HeldTracer, run_together, traced_engine
from tests.families.checkpoints import write_checkpoint

pytestmark = pytest.mark.e2e

PROMPT = [11, 7, 23, 5, 42]
NUM_TOKENS = 4
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SMALL: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 64}
"""Little memory: two engines are there at once."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    """Start an engine that compiles, in this process."""
    checkpoint = write_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    options = {"enforce_eager": False, "compilation_config": {"backend": "eager"}, **SMALL}
    with traced_engine(checkpoint, limits=EngineLimits(trace_step_s=5.0), **options) as model:
        yield model


class Steps:
    """The steps that ran while this was open, by tier."""

    def __init__(self, model: VLLM) -> None:
        self._model = model
        self.tiers: Counter[str] = Counter()

    def _counted(self) -> Counter[str]:
        (counts,) = self._model.engine.collective_rpc("count_events")
        return Counter(counts["steps"])

    def __enter__(self) -> Steps:
        self._before = self._counted()
        return self

    def __exit__(self, *_: object) -> None:
        self.tiers = self._counted() - self._before


def hears_modules(model: VLLM) -> None:
    """Ask for something that no tap has, first of all."""
    _ = model.layers[0].mlp.output


def hears_embedding(model: VLLM) -> None:
    """Ask for what no tap has and comes before the stream that layers take."""
    _ = model.model.embed_tokens.output


def reads_on(model: VLLM, first: Callable[[VLLM], None]) -> Any:
    """Read a layer, and then inside the next."""
    with model.trace(PROMPT, max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            first(model)
            rows.append(model.layers[1].output)
            rows.append(model.layers[2].mlp.output)
            rows.append(model.layers[3].output)
    return tracer


def writes_and_reads_on(model: VLLM, first: Callable[[VLLM], None]) -> Any:
    """Double a layer, which doing twice would show, and read inside the next."""
    with model.trace(PROMPT, max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            first(model)
            model.layers[0].output[:] *= 2
            model.layers[1].output = model.layers[1].output + 1
            rows.append(model.layers[2].mlp.output)
            model.layers[2].output[:, :4] = 3
            rows.append(model.layers[3].output)
            rows.append(model.logits.output)
    return tracer


def begins_with_embeddings(model: VLLM, first: Callable[[VLLM], None]) -> Any:
    """Change the stream where it begins, by both of its names, and read inside a layer."""
    with model.trace(PROMPT, max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            first(model)
            rows.append(model.embed.output)
            model.layers[0].input[:, :4] *= 2
            model.embed.output = model.embed.output + 1
            rows.append(model.layers[1].output)
            rows.append(model.layers[2].mlp.output)
            rows.append(model.logits.output)
    return tracer


def replaces_both_tensors(model: VLLM, first: Callable[[VLLM], None]) -> Any:
    """Replace what the module itself returns, two tensors, and read inside the next."""
    with model.trace(PROMPT, max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            first(model)
            hidden, residual = model.model.layers[1].output
            model.model.layers[1].output = (hidden * 0, residual * 2)
            rows.append(model.layers[2].attn.output)
            rows.append(model.logits.output)
    return tracer


def skips_on(model: VLLM, first: Callable[[VLLM], None]) -> Any:
    """Read a layer, and let its value pass the next two."""
    with model.trace(PROMPT, max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            first(model)
            value = model.layers[0].output.clone()
            model.layers[2].skip(value)
            rows.append(model.layers[2].output)
            rows.append(model.logits.output)
    return tracer


def caches_on(model: VLLM, first: Callable[[VLLM], None]) -> Any:
    """Read a layer, and keep all that comes after."""
    with model.trace(PROMPT, max_tokens=1, tracer_cls=HeldTracer, **GREEDY) as tracer:
        first(model)
        before = model.layers[1].output.save()  # noqa: F841 - fetched by name
        cache = tracer.cache().save()  # noqa: F841 - the same
    return tracer


def looks_into_forwards(model: VLLM, first: Callable[[VLLM], None]) -> Any:
    """Read a layer, and then a call inside the forward of an MLP behind it."""
    with model.trace(PROMPT, max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            first(model)
            rows.append(model.layers[1].output)
            rows.append(model.model.layers[2].mlp.source.maybe_fused_act_quant_0.output)
    return tracer


def run(model: VLLM, *tracers: Any) -> tuple[list[Outcome], list[list[int]], Counter[str]]:
    with Steps(model) as steps:
        ran = run_together(model, [tracer.sent for tracer in tracers])
    outcomes = [ran.outcomes[number] for number in range(len(tracers))]
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return outcomes, [ran.tokens(f"trace-{number}") for number in range(len(tracers))], steps.tiers


def assert_same(one: Any, other: Any) -> None:
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def nothing(model: VLLM) -> None:
    del model


BLOCKS = [
    (reads_on, hears_modules),
    (writes_and_reads_on, hears_modules),
    (begins_with_embeddings, hears_embedding),
    (replaces_both_tensors, hears_modules),
    (skips_on, hears_modules),
    (looks_into_forwards, hears_modules),
]


def test_a_block_that_wants_layers_logits_and_samples_stays_in_the_compiled_step(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            model.embed.output[:] *= 2
            rows.append(model.layers[0].input)
            model.layers[1].input[:] += 1
            rows.append(model.layers[2].output)
            rows.append(model.norm.input)
            rows.append(model.logits.output)
            rows.append(model.samples.output)
    (outcome,), (tokens,), tiers = run(model, tracer)
    assert tiers == {"tap": NUM_TOKENS}
    assert [rows.item() for rows in outcome.saves["rows"][4::5]] == tokens


@pytest.mark.parametrize(("block", "twin"), BLOCKS)
def test_a_block_that_goes_on_to_want_more_finds_what_its_twin_does(
    model: VLLM, block: Callable[..., Any], twin: Callable[[VLLM], None]
) -> None:
    (expected,), (tokens,), _ = run(model, block(model, twin))
    (found,), (own,), tiers = run(model, block(model, nothing))
    assert own == tokens
    assert tiers == {"eager": NUM_TOKENS}
    assert_same(found.saves["rows"], expected.saves["rows"])


def test_a_cache_made_on_the_way_has_what_comes_after(model: VLLM) -> None:
    (expected,), _, _ = run(model, caches_on(model, hears_modules))
    (found,), _, _ = run(model, caches_on(model, nothing))
    names = [set(one.saves["cache"].keys()) for one in (expected, found)]
    assert names[0] == names[1]
    assert "model.model.layers.2.mlp" in names[1]
    assert "model.model.layers.0.mlp" not in names[1]
    paths = [f"model.model.layers.{index}.mlp" for index in (2, 3)]
    assert_same(
        [found.saves["cache"][path].output for path in paths],
        [expected.saves["cache"][path].output for path in paths],
    )


def test_a_neighbour_that_stays_at_the_taps_writes_once(model: VLLM) -> None:
    with model.trace(PROMPT[::-1], max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as writer:
        rows = save([])
        for _ in writer.iter[:]:
            model.layers[0].output[:] *= 2
            rows.append(model.layers[3].output)
    (alone,), _, tiers = run(model, writer)
    assert tiers == {"tap": NUM_TOKENS}
    (beside, _), _, tiers = run(model, writer, reads_on(model, nothing))
    assert tiers == {"eager": NUM_TOKENS}
    assert_same(beside.saves["rows"], alone.saves["rows"])


def test_a_place_that_the_compiled_step_has_passed_is_missed(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=1, tracer_cls=HeldTracer, **GREEDY) as tracer:
        _ = model.layers[2].output
        _ = model.layers[1].mlp.output
    with pytest.raises(OutOfOrderError, match=r"layers\.1\.mlp"):
        run(model, tracer)


def test_what_stands_after_a_loop_means_the_step_that_runs(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as every:
        rows = save([])
        for _ in every.iter[:]:
            rows.append(model.logits.output)
    with model.trace(PROMPT, max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as some:
        for _ in some.iter[:2]:
            _ = model.layers[0].output
        logits = model.logits.output.save()  # noqa: F841 - fetched by name
        token = model.samples.output.save()  # noqa: F841 - the same
    (expected, found), (tokens, _), tiers = run(model, every, some)
    assert tiers == {"tap": NUM_TOKENS}
    assert_same([found.saves["logits"]], [expected.saves["rows"][1]])
    assert found.saves["token"].item() == tokens[1]


def test_steps_return_to_the_compiled_model_once_blocks_want_no_more(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=6, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows = save([])
        for step in tracer.iter[:]:
            rows.append(model.layers[1].output)
            if step == 0:
                rows.append(model.layers[2].mlp.output)
    _, _, tiers = run(model, tracer)
    assert tiers["tap"] >= 4


def test_blocks_call_layers_while_a_neighbour_is_steered(model: VLLM) -> None:
    """What a block computes with the model's modules is its own, and so are the neighbour's rows."""
    engine = Engine.around(model.engine)
    steer = {
        "op": "steer",
        "at": ["layers.2.output", "layers.2.mlp.output"],
        "vector": random_vector(0, 128),
        "scale": 1.0,
    }
    ask = Ask(PROMPT, [steer], max_tokens=NUM_TOKENS)
    (alone,) = engine.run([ask])
    with model.trace(PROMPT, max_tokens=1, tracer_cls=HeldTracer, **GREEDY) as tracer:
        hidden, _ = model.model.layers[1].output
        own = save([model.model.layers[2].mlp(hidden.clone()), model.model.layers[2].mlp(hidden.clone())])
        _ = model.layers[2].mlp.output
        own.append(model.model.layers[2].mlp(hidden.clone()))
    (outcome,), _, _ = run(model, tracer)
    undisturbed = outcome.saves["own"][0]
    pending = engine.submit(ask)
    ran = run_together(model, [tracer.sent])
    assert ran.outcomes[0].error is None
    for one in ran.outcomes[0].saves["own"]:
        torch.testing.assert_close(one, undisturbed, rtol=1e-3, atol=1e-3)
    (reply,) = engine.replies(pending, ran.outputs[pending.request_id])
    assert reply.failure is None
    assert reply.token_ids == alone[0].token_ids
    engine.run([Ask(PROMPT, max_tokens=1)])  # a worker hears of what has finished in the next step


@pytest.fixture(scope="module")
def limited(model: VLLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    """Start an engine with two taps, behind layers 1 and 2."""
    del model  # one after the other starts
    checkpoint = write_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    options = {"enforce_eager": False, "compilation_config": {"backend": "eager"}, **SMALL}
    with traced_engine(checkpoint, limits=EngineLimits(taps="layers.1:3.output"), **options) as limited:
        yield limited


@pytest.mark.parametrize(
    ("point", "tier"),
    [
        ("layers.1.output", "tap"),
        ("layers.3.input", "tap"),
        ("layers.0.output", "eager"),
        ("embed.output", "eager"),
    ],
)
def test_steering_is_the_same_where_no_tap_lies(model: VLLM, limited: VLLM, point: str, tier: str) -> None:
    steer = {"op": "steer", "at": point, "vector": random_vector(0, 128), "scale": 1.0}
    ask = Ask(PROMPT, [steer, {"op": "capture", "at": "layers.3.output"}], max_tokens=NUM_TOKENS)
    (everywhere,), (here,) = Engine.around(model.engine).run([ask]), Engine.around(limited.engine).run([ask])
    assert here[0].collected is not None
    assert here[0].collected.tier == "eager"  # layer 3 has none in either case
    torch.testing.assert_close(
        here[0].tensor("capture_1", "layers.3.output"),
        everywhere[0].tensor("capture_1", "layers.3.output"),
        rtol=1e-4,
        atol=1e-4,
    )
    (alone,) = Engine.around(limited.engine).run([Ask(PROMPT, [steer], max_tokens=NUM_TOKENS)])
    assert alone[0].collected is not None
    assert alone[0].collected.tier == tier
    for one in (model, limited):
        Engine.around(one.engine).run([Ask(PROMPT, max_tokens=1)])


def test_the_stream_begins_where_it_does_where_no_tap_lies(model: VLLM, limited: VLLM) -> None:
    found = []
    for one in (model, limited):
        (outcome,), _, tiers = run(one, begins_with_embeddings(one, nothing))
        assert tiers == {"eager": NUM_TOKENS}
        found.append(outcome.saves["rows"])
    assert_same(*found)


def test_blocks_find_the_same_where_no_tap_lies(model: VLLM, limited: VLLM) -> None:
    # The tapped layer comes first: the first step of a block runs as one of the same source had to.
    for layer, tier in ((1, "tap"), (0, "eager"), (3, "eager")):
        found = []
        for one in (model, limited):
            with one.trace(PROMPT, max_tokens=NUM_TOKENS, tracer_cls=HeldTracer, **GREEDY) as tracer:
                rows = save([])
                for _ in tracer.iter[:]:
                    one.layers[layer].output[:] *= 2
                    rows.append(one.logits.output)
            (outcome,), _, tiers = run(one, tracer)
            found.append(outcome.saves["rows"])
        assert tiers == {tier: NUM_TOKENS}
        assert_same(*found)
