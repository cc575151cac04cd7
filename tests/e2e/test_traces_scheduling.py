"""Blocks and a scheduler that splits prompts and takes memory away, and at the limits of a small engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from vllm import SamplingParams

from nnsight_engine import save
from nnsight_engine.remote_backend.errors import LostTraceError
from nnsight_engine.serialization import DecodeError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError, TraceBytesError
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.engine_kinds import DEFAULT, kind_of_process
from tests.e2e.traced_scenarios import GREEDY, assert_generated, generated_alone
from tests.e2e.traces import HeldTracer, Plain, run_together, traced_engine
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint
from tests.families.reference import reference_activations

pytestmark = pytest.mark.e2e

ONE: Final = list(range(10, 40))
OTHER: Final = list(range(100, 120))
LONG: Final = list(range(100, 200))
SHORT: Final = list(range(30, 80))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[VLLM]:
    """Start an engine with steps of 64 tokens, memory for 12 blocks of 32, and a MiB for each block."""
    options = {
        "limits": EngineLimits(max_trace_bytes=1024 * 1024),
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "block_size": 32,
        "num_gpu_blocks_override": 12,
    }
    with traced_engine(checkpoint, max_model_len=192, **options) as model:
        yield model


def plain_tokens(model: VLLM, prompt: list[int], max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    (output,) = model.engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_a_read_gathers_the_chunks_of_a_prompt(model: VLLM, checkpoint: Path) -> None:
    with model.trace(LONG, **GREEDY):
        pair = model.model.layers[2].output.save()
    assert pair[0].shape == (len(LONG), HIDDEN_SIZE)
    expected = reference_activations(checkpoint, LONG)["layers.2.output"]
    torch.testing.assert_close(pair[0] + pair[1], expected, rtol=1e-3, atol=1e-3)


def test_a_write_goes_to_every_chunk(model: VLLM) -> None:
    value = torch.randn(len(LONG), HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    with model.trace(LONG, max_tokens=4, **GREEDY) as tracer:
        model.model.layers[1].mlp.output = value
        tokens = save([])
        for _ in tracer.iter[:]:
            tokens.append(model.samples.output.item())
    with model.trace(LONG, max_tokens=4, **GREEDY) as tracer:
        model.model.layers[1].mlp.output = value * 1.0
        again = tracer.result.save()
    assert tokens == list(again.outputs[0].token_ids) != plain_tokens(model, LONG, 4)


def test_what_cannot_be_had_of_chunks_is_said(model: VLLM) -> None:
    with pytest.raises(ChunkedPromptError, match=r"layers\.3.*max_num_batched_tokens"):
        with model.trace(LONG, **GREEDY):
            model.model.layers[1].output.save()
            model.model.layers[3].output.save()
    with pytest.raises(ChunkedPromptError, match=r"layers\.3\.mlp"):
        with model.trace(LONG, **GREEDY):
            model.model.layers[3].mlp.output[:] = 0


def test_short_prompts_are_not_split_however_busy_the_step(model: VLLM) -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    held = []
    for _ in range(4):
        with model.trace(SHORT, max_tokens=3, tracer_cls=HeldTracer, **GREEDY) as tracer:
            first = save(model.model.layers[1].mlp.output)  # noqa: F841 - fetched by name
            second = save(model.model.layers[2].mlp.output)  # noqa: F841 - the same
        held.append(tracer.sent)
    beside = [Plain({"prompt_token_ids": [5] * number}, greedy) for number in (30, 41, 52)]
    for outcome in run_together(model, held, beside, late=1).outcomes.values():
        assert outcome.error is None
        assert len(outcome.saves["first"]) == len(outcome.saves["second"]) == len(SHORT)


def test_preempted_requests_read_once_and_write_again(model: VLLM) -> None:
    assert assert_generated(model, generated_alone(model, 8)).num_preempted > 0


def test_writes_never_reach_the_prefix_cache(model: VLLM) -> None:
    before = plain_tokens(model, SHORT, 6)
    with model.trace(SHORT, **GREEDY):
        model.model.layers[0].mlp.output[:] = 5.0
        first = save(model.model.layers[2].mlp.output)
    assert len(first) == len(SHORT)
    assert plain_tokens(model, SHORT, 6) == before


def test_a_trace_takes_part_in_every_step(model: VLLM) -> None:
    with model.trace(ONE, max_tokens=20, tracer_cls=HeldTracer, **GREEDY) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            seen.append(model.samples.output.item())
    plain = Plain(
        {"prompt_token_ids": OTHER}, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    )
    together = run_together(model, [tracer.sent], [plain] * 3)
    assert together.outcomes[0].saves["seen"] == together.tokens("trace-0")
    kind = kind_of_process() or DEFAULT
    if kind.speculation is None and kind.num_stages == 1:  # traces have no drafts, and with stages a gap
        assert together.num_steps <= run_together(model, [], [plain] * 4).num_steps + 1


@pytest.mark.parametrize("is_written", [False, True])
def test_a_block_sees_no_step_behind_a_stop_token(model: VLLM, *, is_written: bool) -> None:
    *_, stop = plain_tokens(model, OTHER, 6)
    with model.trace(OTHER, max_tokens=20, stop_token_ids=[stop], temperature=0.0) as tracer:
        seen = save([])
        for step in tracer.iter[:]:
            if is_written and step == 2:
                model.samples.output = torch.tensor([[stop]])
            seen.append(model.samples.output.item())
        result = tracer.result.save()
    tokens = list(result.outputs[0].token_ids)
    assert seen == tokens
    assert tokens[-1] == stop
    assert len(tokens) == 3 if is_written else len(tokens) > 3


# Limits.


def zeroed(model: VLLM, at: str) -> Any:
    with model.trace(ONE, **GREEDY):
        model.points[at][:] = 0
        logits = model.logits.output.save()
    return logits


@pytest.mark.heavy
@pytest.mark.parametrize("at", ["layers.1.output", "layers.1.mlp.output"])
def test_an_edit_after_a_barrier_reaches_the_model_though_others_were_served_in_between(
    model: VLLM, at: str
) -> None:
    alone = zeroed(model, at)
    with model.trace(OTHER, **GREEDY):
        model.points[at][:] *= 3
        tripled = model.logits.output.save()
    with model.trace(**GREEDY) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(ONE):
            value = model.points[at]
            barrier()
            value[:] = 0
            first = model.logits.output.save()
        with tracer.invoke(OTHER):
            own = model.points[at]
            own[:] *= 3
            barrier()
            second = model.logits.output.save()
    torch.testing.assert_close(first, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, tripled, rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_a_place_of_a_prompt_in_chunks_may_be_read_twice_and_not_edited_later(model: VLLM) -> None:
    with model.trace(LONG, **GREEDY):
        first = model.layers[1].attn.q.save()
        second = model.layers[1].attn.v.save()
    assert len(first) == len(second) == len(LONG)
    with pytest.raises(ChunkedPromptError, match=r"layers\.1\.mlp"):
        with model.trace(LONG, **GREEDY):
            output = model.layers[1].mlp.output
            model.layers[1].mlp.output = output * 2
    with pytest.raises(ValueError, match="100 positions"):
        with model.trace(LONG, **GREEDY):
            model.model.layers[1].mlp.output = torch.zeros(110, HIDDEN_SIZE)


@pytest.mark.heavy
def test_only_the_request_that_holds_too_much_gets_an_error(model: VLLM) -> None:
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    neighbour = Plain("I think dogs are good and", greedy)
    calm = run_together(model, [], [neighbour])
    names = [name for name in model.points() if not name.endswith("pattern")]
    with model.trace(LONG[:60], tracer_cls=HeldTracer, **GREEDY) as saving:
        everything = save({})
        for name in names:
            everything[name] = model.points[name]
    with model.trace(LONG[:60], tracer_cls=HeldTracer, **GREEDY) as writing:
        for layer in model.layers:
            layer.attn.q[:] *= 1.01
            layer.attn.heads[:] *= 1.01
            layer.mlp.up[:] *= 1.01
            layer.mlp.act[:] *= 1.01
            layer.output[:] *= 1.01
    with model.trace(ONE, tracer_cls=HeldTracer, **GREEDY) as growing:
        much = save([])
        much.append(model.layers[0].output.repeat(100, 1))
    with model.trace(LONG[:60], tracer_cls=HeldTracer, **GREEDY) as little:
        last = save([layer.output[-1].clone() for layer in model.layers])  # noqa: F841 - fetched by name
    sent = [tracer.sent for tracer in (saving, writing, growing, little)]
    ran = run_together(model, sent, [neighbour])
    for number in range(3):
        error = ran.outcomes[number].error
        assert isinstance(error, TraceBytesError), (number, error)
        assert "1048576" in str(error)
        assert "max_trace_bytes" in str(error)
        assert not ran.outcomes[number].saves
    assert ran.outcomes[3].error is None
    assert len(ran.outcomes[3].saves["last"]) == len(model.layers)
    assert ran.tokens("plain-0") == calm.tokens("plain-0")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "change",
    [
        {"data": b"no message"},
        {"data": b""},
        {"index": 7},
        {"index": -1},
        {"index": "one"},
        {"num_choices": 3},
        {"groups": []},
        {"key": None},
        None,
    ],
)
def test_what_is_no_trace_ends_its_own_request(model: VLLM, change: dict[str, Any] | None) -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with model.trace(ONE, max_tokens=4, tracer_cls=HeldTracer, **GREEDY) as tracer:
        model.layers[1].output.save()
    sent = tracer.sent
    (params,) = sent.params
    assert params.extra_args is not None
    entry = params.extra_args[TRACE_KEY]
    params.extra_args[TRACE_KEY] = "nothing" if change is None else {**entry, **change}
    ran = run_together(model, [sent], [Plain("I think dogs are", greedy)])
    assert len(ran.tokens("plain-0")) == 4
    assert ran.outputs["trace-0"].finished
    with pytest.raises((LostTraceError, DecodeError, IndexError, ValueError)):
        sent.assign_saved(list(ran.outcomes.values()))
