"""Models with recurrent state: chunks, preemption and the prefix cache change nothing, and no state is shared
between requests with different writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.harness import Ask, Engine, Reply
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint

pytestmark = pytest.mark.e2e

CACHED = "lfm2"
"""The family whose state vLLM keeps in its prefix cache on a CPU; its Mamba-2 kernels there cannot."""
POINTS = ["layers.*.mixer.output", "layers.*.attn.q", "layers.*.output"]
CAPTURE: dict[str, Any] = {"op": "capture", "at": POINTS, "name": "c"}
NUM_TOKENS = 40


def prompt(seed: int, length: int = 110) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 300, (length,), generator=generator).tolist()


def steer(scale: float, **where: Any) -> dict[str, Any]:
    vector = torch.randn(HIDDEN_SIZE, generator=torch.Generator().manual_seed(3)).tolist()
    found = {"op": "steer", "at": "layers.0.mixer.output", "vector": vector, "scale": scale}
    return found | ({"where": where} if where else {})


@pytest.fixture(scope="module", params=[CACHED, pytest.param("nemotron_h", marks=pytest.mark.heavy)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(str(request.param), tmp_path_factory.mktemp(str(request.param)))


@pytest.fixture(scope="module")
def batch() -> list[Ask]:
    """Requests of which every second one writes; all read."""
    return [
        Ask(
            prompt(index), [*([steer(1.0 + index)] if index % 2 == 0 else []), CAPTURE], max_tokens=NUM_TOKENS
        )
        for index in range(6)
    ]


@pytest.fixture(scope="module")
def calm(checkpoint: Path, batch: list[Ask]) -> list[Reply]:
    """The same requests one by one, with each prompt in one step."""
    with Engine(checkpoint, dtype="float32", max_model_len=256, enable_prefix_caching=False) as engine:
        return [reply for ask in batch for (reply,) in engine.run([ask])]


@pytest.fixture(scope="module")
def engine(checkpoint: Path, calm: list[Reply]) -> Iterator[Engine]:
    """Serve with chunks, a prefix cache, and too little memory for all requests at once."""
    assert calm
    with Engine(
        checkpoint,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=160,
        num_gpu_blocks_override=10,
        enable_prefix_caching=checkpoint.name.startswith(CACHED),
    ) as engine:
        yield engine


def assert_same(reply: Reply, expected: Reply) -> None:
    assert reply.failure is None
    assert reply.token_ids == expected.token_ids
    mine, theirs = reply.result("c"), expected.result("c")
    assert mine.positions == theirs.positions
    for point in theirs.points:  # type: ignore[union-attr] # a capture
        value, wanted = reply.tensor("c", point), expected.tensor("c", point)
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()), msg=point)


def test_chunks_and_preemption_change_nothing(engine: Engine, batch: list[Ask], calm: list[Reply]) -> None:
    replies = [reply for (reply,) in engine.run(batch)]
    for reply, expected in zip(replies, calm, strict=True):
        assert_same(reply, expected)
    recomputed = [reply.collected.recomputed_tokens for reply in replies if reply.collected]
    assert sum(recomputed) > 0


def test_states_in_the_prefix_cache_serve_equal_writes_only(engine: Engine) -> None:
    text = prompt(11, 150)  # a state is kept at the end of a whole block of 128 tokens
    is_cached = bool(engine.core.vllm_config.cache_config.enable_prefix_caching)
    plain = engine.ask(text, max_tokens=8)
    again = engine.ask(text, max_tokens=8)
    assert (again.num_cached_tokens > 0) == is_cached
    assert again.token_ids == plain.token_ids
    steered = engine.ask(text, [steer(4.0)], max_tokens=8)
    assert steered.num_cached_tokens == 0
    assert steered.token_ids != plain.token_ids
    equal = engine.ask(text, [steer(4.0)], max_tokens=8)
    assert (equal.num_cached_tokens > 0) == is_cached
    assert equal.token_ids == steered.token_ids
    other = engine.ask(text, [steer(5.0)], max_tokens=8)
    assert other.num_cached_tokens == 0
    assert engine.ask(text, max_tokens=8).token_ids == plain.token_ids


def test_a_read_of_the_prompt_takes_no_cached_state(engine: Engine) -> None:
    ask = Ask(prompt(12, 150), [CAPTURE], max_tokens=2)
    first, second = engine.run([ask])[0][0], engine.run([ask])[0][0]
    assert second.num_cached_tokens == 0
    assert_same(second, first)


def test_infinities_stay_in_their_request(engine: Engine) -> None:
    text = prompt(13, 150)
    plain = engine.ask(text, max_tokens=8)
    # All blocks are used by requests whose states are not finite, then by others.
    engine.run([Ask(prompt(20 + number, 150), [steer(1e38)], max_tokens=4) for number in range(8)])
    asks = [Ask(prompt(30 + number, 150), [], max_tokens=8) for number in range(8)]
    assert all(reply.failure is None for (reply,) in engine.run(asks))
    assert engine.llm.reset_prefix_cache()
    assert engine.ask(text, max_tokens=8).token_ids == plain.token_ids
