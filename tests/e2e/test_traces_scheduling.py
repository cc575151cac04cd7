"""Blocks and a scheduler that splits prompts and takes memory away: chunks, preemption, a prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from nnsight_engine import save
from nnsight_engine.vllm_backend.request_tracer import SentTrace
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.traces import HeldTracer, Plain, counted_recomputations, run_together, traced_engine
from tests.narrow_model import WIDTH

pytestmark = pytest.mark.e2e

GREEDY: dict[str, Any] = {"temperature": 0.0}
LONG = "It was a dark and stormy night. " * 14
SHORT = "It was a dark and stormy night. " * 4


@pytest.fixture(scope="module")
def model(narrow: Path) -> Iterator[VLLM]:
    """Start an engine with steps of 64 tokens and memory for 24 blocks of 32."""
    options = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "block_size": 32,
        "num_gpu_blocks_override": 24,
    }
    with traced_engine(narrow, **options) as model:
        yield model


def test_a_read_gathers_the_chunks_of_a_prompt(model: VLLM, reference: Any) -> None:
    ids = model.tokenizer.encode(LONG)
    assert len(ids) > 64
    with model.trace(LONG, **GREEDY):
        pair = model.model.layers[9].output.save()
    with torch.no_grad():
        expected = reference.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[10][0]
    assert pair[0].shape == (len(ids), WIDTH)
    torch.testing.assert_close(pair[0] + pair[1], expected, rtol=1e-3, atol=2e-3)


def test_a_write_goes_to_every_chunk(model: VLLM) -> None:
    num_tokens = len(model.tokenizer.encode(LONG))
    value = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(0))
    with model.trace(LONG, max_tokens=4, **GREEDY) as tracer:
        model.model.layers[3].mlp.output = value
        tokens = save([])
        for _ in tracer.iter[:]:
            tokens.append(model.samples.output.item())
    with model.trace(LONG, max_tokens=4, **GREEDY) as tracer:
        model.model.layers[3].mlp.output = value * 1.0
        again = tracer.result.save()
    assert tokens == list(again.outputs[0].token_ids)
    plain = model.engine.generate([LONG], SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
    assert tokens != list(plain[0].outputs[0].token_ids)


def test_what_cannot_be_had_of_chunks_is_said(model: VLLM) -> None:
    with pytest.raises(ChunkedPromptError, match=r"layers\.5.*max_num_batched_tokens"):
        with model.trace(LONG, **GREEDY):
            model.model.layers[3].output.save()
            model.model.layers[5].output.save()
    with pytest.raises(ChunkedPromptError, match=r"layers\.3\.mlp"):
        with model.trace(LONG, **GREEDY):
            model.model.layers[3].mlp.output[:] = 0


def test_short_prompts_are_not_split_however_busy_the_step(model: VLLM) -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    held = []
    for _ in range(4):
        with model.trace(SHORT, max_tokens=3, tracer_cls=HeldTracer, **GREEDY) as tracer:
            first = save(model.model.layers[3].mlp.output)  # noqa: F841 - fetched by name
            second = save(model.model.layers[5].mlp.output)  # noqa: F841 - the same
        held.append(tracer.sent)
    ran = run_together(model, held, [Plain("A " * number, greedy) for number in (30, 41, 52)], late=1)
    for outcome in ran.outcomes.values():
        assert outcome.error is None
        assert (
            len(outcome.saves["first"]) == len(outcome.saves["second"]) == len(model.tokenizer.encode(SHORT))
        )


def generating(model: VLLM, number: int) -> SentTrace:
    """Return a trace that reads, and every second one that writes, at each of 90 tokens."""
    prompt = f"Story number {number}. " + SHORT
    writes = number % 2 == 0
    direction = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
    with model.trace(prompt, max_tokens=90, ignore_eos=True, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows, tokens = save([]), save([])
        for _ in tracer.iter[:]:
            if writes:
                output = model.model.layers[5].mlp.output
                output[:] += direction.to(output) * 0.3
            rows.append(model.model.layers[20].mlp.output)
            tokens.append(model.samples.output.item())
    sent: SentTrace = tracer.sent
    return sent


def test_preempted_requests_read_once_and_write_again(model: VLLM) -> None:
    with counted_recomputations(model) as counted:
        together = run_together(model, [generating(model, number) for number in range(8)])
    assert counted.num_preempted > 0
    # Four at a time have memory enough.
    with counted_recomputations(model) as counted:
        fours = [
            run_together(model, [generating(model, number) for number in four])
            for four in (range(4), range(4, 8))
        ]
    assert not counted.num_preempted
    for number in range(8):
        mine, theirs = together.outcomes[number], fours[number // 4].outcomes[number % 4]
        assert mine.error is None
        assert mine.saves["tokens"] == theirs.saves["tokens"]
        assert len(mine.saves["rows"]) == 90
        for one, other in zip(mine.saves["rows"], theirs.saves["rows"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_writes_never_reach_the_prefix_cache(model: VLLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0)
    before = model.engine.generate([SHORT], params, use_tqdm=False)[0].outputs[0].token_ids
    with model.trace(SHORT, **GREEDY):
        model.model.layers[0].mlp.output[:] = 5.0
        first = save(model.model.layers[2].mlp.output)
    assert len(first) == len(model.tokenizer.encode(SHORT))
    assert model.engine.generate([SHORT], params, use_tqdm=False)[0].outputs[0].token_ids == before
