"""Drafts are judged so that what is generated has the target's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import gather_draft_sampled
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

CHI2_4_999 = 18.5
"""What a sum of squares with four degrees of freedom exceeds once in a thousand draws."""
TARGET = torch.tensor([1.0, 0.0, -1.0, 0.5, -0.5])
DRAFT = torch.tensor([-1.0, 1.0, 0.5, 0.0, -0.5])


def judged(
    target: torch.Tensor, drafts: list[list[int]], temperature: list[float], **options: Any
) -> tuple[list[list[int]], list[int]]:
    """Judge the drafts of each request; logits rows are those of the drafts and one more for each."""
    counts = torch.tensor([len(one) + 1 for one in drafts])
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    requests = torch.repeat_interleave(counts).int()
    places = (torch.arange(len(requests)) - ends[requests]).int()
    sampled, num_sampled = rejection_sample(
        target,
        options.pop("draft_logits", None),
        torch.tensor([token for one in drafts for token in [0, *one]], dtype=torch.int32),
        ends,
        10 + places.long(),
        torch.arange(len(drafts), dtype=torch.int32),
        requests,
        places,
        torch.tensor(temperature),
        options.pop("seeds", torch.arange(len(drafts))),
        max(len(one) for one in drafts),
        **options,
    )
    return [row[:num].tolist() for row, num in zip(sampled, num_sampled, strict=True)], num_sampled.tolist()


def test_greedy_requests_take_drafts_until_another_token_is_better() -> None:
    best = [3, 1, 4, 1, 0, 2, 2, 2, 0, 1]
    target = torch.nn.functional.one_hot(torch.tensor(best), 5).float()
    #                    all right  second wrong  none  placeholder
    got, _ = judged(target, [[3, 1], [1, 2, 2], [], [-1]], [0.0] * 4)
    assert got == [[3, 1, 4], [1, 0], [2], [0]]


@pytest.mark.parametrize("has_logits", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_requests_follow_the_target(has_logits: bool, temperature: float) -> None:
    num = 20_000
    draw = torch.Generator().manual_seed(3)
    proposal = (DRAFT / temperature).softmax(-1)
    drafts = (
        torch.multinomial(proposal, num, replacement=True, generator=draw) if has_logits else torch.ones(num)
    )
    got, num_sampled = judged(
        (TARGET / temperature).repeat(2 * num, 1),
        [[one] for one in drafts.int().tolist()],
        [temperature] * num,
        seeds=torch.arange(num),
        draft_logits=DRAFT.repeat(num, 1, 1) if has_logits else None,
    )
    expected = (TARGET / temperature).softmax(-1)
    first = torch.tensor([one[0] for one in got]).bincount(minlength=5)
    assert ((first - expected * num).square() / (expected * num)).sum() < CHI2_4_999
    bonus = torch.tensor([one[1] for one in got if len(one) == 2]).bincount(minlength=5)
    num_bonus = sum(one == 2 for one in num_sampled)
    assert ((bonus - expected * num_bonus).square() / (expected * num_bonus)).sum() < CHI2_4_999
    accepted = torch.minimum(expected, proposal).sum() if has_logits else expected[1]
    assert abs(num_bonus / num - accepted) < 0.015


def test_a_placeholder_ends_the_drafts_of_a_sampled_request() -> None:
    target = torch.full((4, 5), -torch.inf)
    target[0, 2] = target[1, 4] = target[2, 1] = target[3, 0] = 0.0
    assert judged(target, [[2, -1, 1]], [1.0])[0] == [[2, 4]]


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    draw = torch.Generator().manual_seed(5)
    target = torch.randn(6, 40, generator=draw)
    best = target.argmax(-1).tolist()
    certain = torch.full((40,), -torch.inf)
    certain[7] = 0.0
    target[3:] = certain
    got, _ = judged(target, [[best[0], best[1]], [7, 8]], [0.0, 1.0], draft_logits=torch.zeros(2, 2, 40))
    assert got == [[best[0], best[1], best[2]], [7, 7]]


def test_given_rates_replace_the_judgement() -> None:
    target = TARGET.repeat(3, 1)
    rates = {"synthetic_conditional_rates": torch.tensor([1.0, 0.0])}
    got, num_sampled = judged(target, [[4, 4]], [0.0], **rates)
    assert (got, num_sampled) == ([[4, 0]], [2])
    assert judged(target, [[4, 4]], [1.0], **rates)[1] == [2]


def test_block_verification_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="_compute_cumulative_log_p_kernel has no function"):
        judged(TARGET.repeat(2, 1), [[1]], [1.0], use_block_verification=True)


def test_drafts_within_a_prompt_are_placeholders() -> None:
    drafts, positions = gather_draft_sampled(
        torch.tensor([5, 6, 7, 8, 9, 10], dtype=torch.int32),
        torch.tensor([3, 4, 5, 8, 9, 10]),
        torch.arange(6),
        torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32),
        torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32),
        torch.tensor([4, 8], dtype=torch.int32),
    )
    assert drafts.tolist() == [5, -1, -1, 8, 9, 10]
    assert positions.tolist() == [3, 4, 5, 8, 9, 10]
