"""Preemption: writes live on in rebuilt keys and values, reads come once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e.harness import Ask, Engine, random_vector
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint

pytestmark = pytest.mark.e2e

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Serve with 12 blocks of 32 tokens."""
    engine = Engine(
        write_checkpoint("llama", tmp_path_factory.mktemp("llama")),
        dtype="float32",
        block_size=32,
        num_gpu_blocks_override=12,
        max_model_len=256,
    )
    yield engine
    engine.close()


def ask(index: int) -> Ask:
    """Return the index-th request; every second one only reads."""
    prompt = f"Story number {index}. " + "It was a dark and stormy night. " * 2
    interventions: list[dict[str, Any]] = [
        {"op": "capture", "at": ["layers.3.output"], "name": "c"},
        {"op": "probe", "at": "layers.3.output", "weights": random_vector(3, HIDDEN_SIZE), "name": "p"},
    ]
    if index % 2 == 0:
        steer = {
            "op": "steer",
            "at": "layers.1.output",
            "vector": random_vector(index, HIDDEN_SIZE),
            "scale": 0.5,
        }
        interventions = [steer, *interventions]
    return Ask(prompt, interventions, max_tokens=NUM_TOKENS)


def test_writes_survive_in_rebuilt_kv_and_reads_come_once(engine: Engine) -> None:
    batch = [ask(index) for index in range(8)]
    together = [reply for (reply,) in engine.run(batch)]
    # Two at a time have memory enough.
    calm = [reply for first in range(0, 8, 2) for (reply,) in engine.run(batch[first : first + 2])]
    recomputed = []
    for index, (joint, alone) in enumerate(zip(together, calm, strict=True)):
        assert joint.failure is None
        assert joint.collected is not None
        assert alone.collected is not None
        assert alone.collected.recomputed_tokens == 0
        recomputed.append(joint.collected.recomputed_tokens)
        num_positions = len(engine.token_ids(batch[index].prompt)) + NUM_TOKENS - 1
        result = joint.result("c")
        assert result.positions == list(range(num_positions))
        assert joint.result("p").positions == result.positions
        assert joint.token_ids == alone.token_ids
        mine, theirs = joint.tensor("c", "layers.3.output"), alone.tensor("c", "layers.3.output")
        scale = theirs.abs().amax(dim=-1, keepdim=True)
        torch.testing.assert_close(mine / scale, theirs / scale, rtol=1e-3, atol=1e-3)
    # The test is about preemption only if somebody was preempted, steered requests included.
    assert sum(recomputed[::2]) > 0


def test_aborts_disturb_no_others_and_leave_nothing(engine: Engine) -> None:
    pending = [engine.submit(ask(index)) for index in range(4)]
    done: dict[str, Any] = {}
    for _ in range(10):
        engine.core.step()
    gone = pending[1:3]
    engine.core.abort_request([entry.request_id for entry in gone])
    for entry in gone:
        engine.router.close(entry.request_id)
    while engine.core.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.core.step() if output.finished}
    for index in (0, 3):
        (reply,) = engine.replies(pending[index], done[pending[index].request_id])
        ((alone,),) = engine.run([ask(index)])
        assert reply.token_ids == alone.token_ids
        assert reply.result("c").positions == alone.result("c").positions
    assert set(engine.held().values()) == {0}
