"""Numbers of requests are repeated for their drafts, and a step without drafts is no error."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from nnsight_engine.vllm_backend.steps.cpu_sampling import apply_sampling_constraints, expand_batch_to_tokens


def test_each_token_has_its_requests_number() -> None:
    numbers, until = torch.tensor([0.0, 0.5, 0.7]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert (
        expand_batch_to_tokens(numbers, until, 5, 0, 1).tolist()
        == torch.tensor([1, 1, 0.7, 0.7, 0.7]).tolist()
    )
    assert expand_batch_to_tokens(numbers, torch.zeros(3, dtype=torch.int32), 0).tolist() == []


def test_no_drafts_are_no_error() -> None:
    metadata = SimpleNamespace(
        all_greedy=False, temperature=torch.ones(1), top_k=torch.ones(1, dtype=torch.int32), top_p=None
    )
    assert apply_sampling_constraints(
        torch.empty(0, 7), torch.zeros(1, dtype=torch.int32), metadata
    ).shape == (0, 7)
