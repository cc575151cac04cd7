"""Attention patterns equal those of transformers' eager attention, whatever way they were computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine.plans.collect.results import CollectedCapture
from tests.e2e.harness import Ask, Reply, small_engine
from tests.families.checkpoints import HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS, write_checkpoint
from tests.families.reference import load_reference_model

pytestmark = pytest.mark.e2e

_IN_CORE = ("llama", "gpt2")

PROMPT = torch.randint(1, 300, (70,), generator=torch.Generator().manual_seed(5)).tolist()
EVERY_LAYER = "layers.*.attn.pattern"
NUM_TOKENS = 6
NUM_POSITIONS = len(PROMPT) + NUM_TOKENS - 1
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    # A cap and windows that change the patterns of these small models plainly.
    "gemma2": {"attn_logit_softcapping": 0.5, "sliding_window": 24},
    "mistral": {"sliding_window": 16},
}


def write(family: str, folder: Path) -> Path:
    checkpoint = write_checkpoint(family, folder)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | CHECKPOINTS[family]))
    return checkpoint


def expected_patterns(checkpoint: Path, token_ids: list[int]) -> list[torch.Tensor]:
    """Return transformers' own patterns by layer, ``[positions, heads, positions]``."""
    model: Any = load_reference_model(checkpoint)
    with torch.inference_mode():
        attentions = model(torch.tensor([token_ids]), output_attentions=True).attentions
    return [attention[0].transpose(0, 1) for attention in attentions]


def capture(at: str | list[str] = EVERY_LAYER, **fields: Any) -> dict[str, Any]:
    return {"op": "capture", "at": at, "name": "p"} | fields


def assert_patterns(reply: Reply, checkpoint: Path, name: str = "p", prompt: list[int] = PROMPT) -> None:
    expected = expected_patterns(checkpoint, prompt + reply.token_ids[:-1])
    result = reply.result(name)
    assert isinstance(result, CollectedCapture)
    for point in result.points:
        rows = expected[int(point.split(".")[1])][result.positions][..., : result.positions[-1] + 1]
        torch.testing.assert_close(reply.tensor(name, point), rows, rtol=1e-3, atol=1e-5, msg=point)


@pytest.mark.parametrize(
    "family",
    [
        family if family in _IN_CORE else pytest.param(family, marks=pytest.mark.heavy)
        for family in CHECKPOINTS
    ],
)
def test_patterns_equal_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = write(family, tmp_path)
    with small_engine(checkpoint) as engine:
        reply = engine.ask(
            PROMPT,
            [
                capture(),
                capture("layers.1.attn.pattern", name="some", where={"positions": [3, 40, -1, 72]}),
                capture("layers.0.attn.pattern", name="decoded", where={"phase": "generated"}),
                capture("layers.-1.attn.pattern", name="last", reduce="last"),
                capture("layers.2.attn.pattern", name="half", dtype="bfloat16", where={"positions": [9]}),
                {"op": "capture", "at": "layers.1.attn.output", "name": "neighbour"},
            ],
            max_tokens=NUM_TOKENS,
        )
        assert_patterns(reply, checkpoint)
        assert_patterns(reply, checkpoint, "some")
        assert_patterns(reply, checkpoint, "decoded")
        rows = reply.tensor("p", "layers.2.attn.pattern")
        assert rows.shape == (NUM_POSITIONS, NUM_HEADS, NUM_POSITIONS)
        torch.testing.assert_close(rows.sum(dim=-1), torch.ones(NUM_POSITIONS, NUM_HEADS))
        some = reply.result("some")
        assert isinstance(some, CollectedCapture)
        assert some.positions == [3, 40, 69, 72]
        assert reply.tensor("some", "layers.1.attn.pattern").shape == (4, NUM_HEADS, 73)
        last = reply.tensor("last", f"layers.{NUM_LAYERS - 1}.attn.pattern")
        assert torch.equal(last, reply.tensor("p", f"layers.{NUM_LAYERS - 1}.attn.pattern")[-1])
        half = reply.tensor("half", "layers.2.attn.pattern")
        assert torch.equal(half, rows[9:10, :, :10].bfloat16().float())
        assert reply.collected is not None
        assert reply.collected.tier == "eager"
        assert reply.collected.applied[2].positions == list(range(len(PROMPT), NUM_POSITIONS))
        # Nothing of the hooks is left, and nothing of the request.
        assert engine.ask(PROMPT, max_tokens=NUM_TOKENS).token_ids == reply.token_ids
        assert set(engine.held().values()) == {0}


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(one, marks=pytest.mark.heavy) for one in ("gemma2", "mistral"))]
)
def test_keys_that_are_no_numbers_do_not_reach_the_next_request(family: str, tmp_path: Path) -> None:
    """Zero times NaN is NaN: what attention leaves out counts too, in the rest of a block."""
    checkpoint = write(family, tmp_path)
    huge = {"op": "steer", "at": "layers.*.output", "vector": [3e38] * HIDDEN_SIZE}
    options = {"num_gpu_blocks_override": 9, "max_model_len": 96, "enable_prefix_caching": False}
    with small_engine(checkpoint, **options) as engine:
        expected = engine.ask(PROMPT, max_tokens=2, sampling={"logprobs": 1})
        engine.ask(PROMPT, [huge], max_tokens=20)
        for _ in range(4):  # one of them has the blocks
            after = engine.ask(PROMPT, max_tokens=2, sampling={"logprobs": 1})
            assert after.logprobs == expected.logprobs


def test_patterns_do_not_depend_on_the_way(tmp_path: Path) -> None:
    checkpoint = write("mistral", tmp_path)
    late = capture(name="late", where={"phase": "generated"})
    with small_engine(checkpoint, max_num_batched_tokens=24, enable_prefix_caching=True) as engine:
        # The prompt is in the cache, and a capture of generated positions alone must not use it.
        engine.ask(PROMPT, max_tokens=NUM_TOKENS)
        batch = [Ask(PROMPT, [capture(), late]), Ask(PROMPT[:30]), Ask(PROMPT, [late], NUM_TOKENS)]
        (both,), _, (alone,) = engine.run(batch)
        assert_patterns(both, checkpoint)
        assert_patterns(alone, checkpoint, "late")
        steer = {"op": "steer", "at": "layers.1.attn.q", "vector": [1.0] * 256, "scale": 3.0}
        steered = engine.ask(PROMPT, [steer, capture()], max_tokens=NUM_TOKENS)
        plain, moved = (reply.tensor("p", "layers.1.attn.pattern") for reply in (both, steered))
        assert not torch.allclose(plain[:30, :, :30], moved[:30, :, :30], atol=1e-2)


@pytest.mark.heavy  # compiles a model
def test_a_prompt_capture_lets_decoding_be(tmp_path: Path) -> None:
    checkpoint = write("llama", tmp_path)
    compiled = {"enforce_eager": False, "compilation_config": {"backend": "eager"}}
    with small_engine(checkpoint, **compiled) as engine:
        reply = engine.ask(PROMPT, [capture(where={"positions": [5, 20]})], max_tokens=NUM_TOKENS)
        assert_patterns(reply, checkpoint)
        pending = engine.submit(Ask(PROMPT, [capture(where={"positions": [5]}, reduce="last")], NUM_TOKENS))
        for _ in range(3):
            engine.core.step()
        (counts,) = engine.llm.collective_rpc("count_interventions")
        # The pattern itself, without the keys it came from.
        assert counts["captured_bytes"] == NUM_LAYERS * NUM_HEADS * 6 * 4
        engine.core.abort_request([pending.request_id])
        engine.router.close(pending.request_id)
        assert set(engine.held().values()) == {0}
