"""What chunks of a prompt change beside what ``test_random_requests`` compares: nothing of what is drawn."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.harness import Ask, Engine

pytestmark = pytest.mark.e2e


def test_a_seed_gives_the_same_tokens_whether_the_prompt_comes_in_chunks(chunked_engine: Engine) -> None:
    ask = Ask(list(range(100, 120)), max_tokens=8, sampling={"temperature": 1.0, "seed": 5})
    ((alone,),) = chunked_engine.run([ask])
    other = Ask(list(range(50, 70)), max_tokens=8)  # of the step's 32 tokens it leaves 12
    _, (beside,) = chunked_engine.run([other, ask])
    assert beside.token_ids == alone.token_ids


def test_a_prompt_whose_mean_is_needed_waits_for_a_step_with_room(chunked_engine: Engine) -> None:
    ablation = {"op": "ablate", "method": "mean", "at": "layers.1.output"}
    last = {"op": "capture", "at": "layers.29.output", "reduce": "last", "name": "last"}
    ask = Ask(list(range(100, 120)), [ablation, last], max_tokens=4)
    ((alone,),) = chunked_engine.run([ask])
    other = Ask(list(range(50, 70)), max_tokens=8)  # of the step's 32 tokens it leaves 12
    _, (beside,), (again,), _ = chunked_engine.run([other, ask, ask, other])
    assert (beside.token_ids, again.token_ids) == (alone.token_ids, alone.token_ids)
    for one in (beside, again):
        found, expected = (reply.tensor("last", "layers.29.output") for reply in (one, alone))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
