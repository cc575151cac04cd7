"""Tokens that a block was shown are those that the model goes on with, and its thread has processor time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from nnsight_engine.interleaving.threads import TimeBudgetError
from nnsight_engine.vllm_backend.steps.replayed_samples import ReplayedSamples
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_main import WaitingThreads


def sampled(rows: list[int], scale: float = 1.0) -> Any:
    tokens = torch.tensor(rows, dtype=torch.int32)[:, None]
    logprobs = SimpleNamespace(
        logprob_token_ids=tokens.repeat(1, 3),
        logprobs=tokens.repeat(1, 3).float() * scale,
        selected_token_ranks=tokens[:, 0].clone(),
    )
    return SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def test_what_was_sampled_comes_back_with_its_probabilities_whatever_row_it_has_then() -> None:
    kept, first = ReplayedSamples(), sampled([11, 12, 13])
    kept.keep("own", 1, first.sampled_token_ids, first, 1, {})
    again = sampled([21, 22, 23], scale=9.0)
    kept.put_back(again, {"own": 2, "other": 0}, range(3), {"own"})  # left out once more
    assert again.sampled_token_ids[:, 0].tolist() == [21, 22, 23]
    kept.put_back(again, {"own": 2, "other": 0}, range(3), ())
    assert again.sampled_token_ids[:, 0].tolist() == [21, 22, 12]
    assert again.logprobs_tensors.logprobs[:, 0].tolist() == [189.0, 198.0, 12.0]
    assert again.logprobs_tensors.logprob_token_ids[2].tolist() == [12, 12, 12]
    assert again.logprobs_tensors.selected_token_ranks.tolist() == [21, 22, 12]
    later = sampled([31, 32, 33])
    kept.put_back(later, {"own": 0}, range(3), ())
    assert later.sampled_token_ids[:, 0].tolist() == [31, 32, 33], "once"


def test_a_sample_comes_back_beside_drafts_of_others() -> None:
    kept, first = ReplayedSamples(), sampled([11, 12])
    kept.keep("own", 1, first.sampled_token_ids, first, 1, {})
    again = sampled([21, 22, 23, 24])
    again.sampled_token_ids = torch.tensor([[21, 22, 23], [24, -1, -1]])
    kept.put_back(again, {"own": 1, "other": 0}, (0, 3), ())
    assert again.sampled_token_ids.tolist() == [[21, 22, 23], [12, -1, -1]]
    assert again.logprobs_tensors.logprobs[:, 0].tolist() == [21.0, 22.0, 23.0, 12.0]


def test_a_request_that_ended_leaves_nothing() -> None:
    kept, first = ReplayedSamples(), sampled([11])
    kept.keep("own", 0, first.sampled_token_ids, first, 0, {})
    kept.forget({"own"})
    again = sampled([21])
    kept.put_back(again, {"own": 0}, range(3), ())
    assert again.sampled_token_ids.item() == 21


def test_a_random_stream_goes_on_as_if_it_had_been_drawn_from_once() -> None:
    generator = torch.Generator().manual_seed(3)
    batch = SimpleNamespace(generators={0: generator})
    expected = torch.rand(3, generator=torch.Generator().manual_seed(3))
    kept = ReplayedSamples()
    before = kept.states(batch)
    torch.rand(1, generator=generator)
    first = sampled([1])
    kept.keep("own", 0, first.sampled_token_ids, first, 0, before)
    assert torch.equal(torch.rand(3, generator=generator), expected)


def test_a_block_that_waits_for_a_processor_is_not_late() -> None:
    threads = WaitingThreads(budget_s=0.2, count=1)
    stack = threads.take()
    assert stack.start(lambda: time.sleep(0.5)).empty() == (None, None)  # others compute meanwhile


def test_a_block_over_its_time_budget_gets_an_error() -> None:
    def compute() -> None:
        while True:
            pass

    _, error = WaitingThreads(budget_s=0.2, count=1).take().start(compute).empty()
    assert isinstance(error, TimeBudgetError)
