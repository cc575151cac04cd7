"""Sampling: noise of vLLM's hash, samples that follow the logits, and drafts judged by the target."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import gather_draft_sampled
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from nnsight_engine.vllm_backend.cpu_kernels.sampling import gumbel_noise, uniform

CHI2_7_999 = 24.3
"""What a sum of squares with seven degrees of freedom exceeds once in a thousand draws."""
LOGITS = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, -torch.inf, 0.3])
MASK = 0xFFFFFFFF


def murmur3(seed: int, position: int, token: int) -> int:
    """MurmurHash3 (32 bits) of four words, by Austin Appleby's description."""

    def rotated(value: int, bits: int) -> int:
        return (value << bits | value >> (32 - bits)) & MASK

    value = 0
    for word in (seed & MASK, seed >> 32 & MASK, position & MASK, token):
        key = rotated(word * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        value = (rotated(value ^ key, 13) * 5 + 0xE6546B64) & MASK
    value ^= 16
    value = (value ^ value >> 16) * 0x85EBCA6B & MASK
    value = (value ^ value >> 13) * 0xC2B2AE35 & MASK
    return value ^ value >> 16


def sample(
    logits: torch.Tensor, temperature: float, seed: int = 7, *, is_drafting: bool = False
) -> torch.Tensor:
    """Sample a token for each row, rows at positions 0, 1, … of one request."""
    sampled: torch.Tensor = gumbel_sample(
        logits,
        torch.zeros(len(logits), dtype=torch.int32),
        torch.tensor([temperature]),
        torch.tensor([seed]),
        torch.arange(len(logits)),
        apply_temperature=True,
        is_drafting=is_drafting,
    )
    return sampled


def test_noise_is_that_of_the_hash() -> None:
    seeds, positions = torch.tensor([3, -5, 1 << 40 | 9]), torch.tensor([0, 77, (1 << 30) + 2])
    got = gumbel_noise(seeds, positions, 50)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for token in range(50):
            drawn = (murmur3(seed, position, token) + 0.5) * 2**-32
            assert got[row, token].item() == pytest.approx(-math.log(-math.log1p(-drawn)), abs=1e-5)


@pytest.mark.parametrize(("temperature", "is_drafting"), [(1.0, False), (0.5, False), (1.0, True)])
def test_samples_follow_the_distribution(temperature: float, is_drafting: bool) -> None:
    num = 20_000
    counts = sample(LOGITS.repeat(num, 1), temperature, is_drafting=is_drafting).bincount(
        minlength=len(LOGITS)
    )
    expected = (LOGITS / temperature).softmax(-1) * num
    assert counts[7] == 0
    possible = expected > 0
    assert ((counts - expected)[possible].square() / expected[possible]).sum() < CHI2_7_999


def test_uniform_numbers_are_uniform_and_not_those_of_tokens() -> None:
    num, bins = 20_000, 8
    drawn = uniform(torch.full((num,), 7), torch.arange(num))
    assert 0 < drawn.min() < drawn.max() < 1
    counts = (drawn * bins).long().bincount(minlength=bins)
    assert ((counts - num / bins).square() / (num / bins)).sum() < CHI2_7_999
    noise = gumbel_noise(torch.full((num,), 7), torch.arange(num), 1)[:, 0]
    assert torch.corrcoef(torch.stack([drawn, noise]))[0, 1].abs() < 0.03


def test_a_zero_temperature_takes_the_first_best_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert sample(logits, 0.0).tolist() == [1, 0]


def test_a_row_samples_the_same_beside_others() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    requests = torch.tensor([2, 0, 1, 2, 0, -1], dtype=torch.int32)
    temperatures, seeds = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([11, 12, 13])
    positions = torch.tensor([5, 6, 7, 8, 9, 0])
    options = {"apply_temperature": True, "is_drafting": False}
    together = gumbel_sample(logits, requests, temperatures, seeds, positions, **options)
    for row in range(5):
        own = slice(row, row + 1)
        alone = gumbel_sample(logits[own], requests[own], temperatures, seeds, positions[own], **options)
        assert together[row] == alone[0]
    assert together[2] == logits[2].argmax()
    assert together[5] == logits[5].argmax()  # padding


def test_logits_of_drafts_are_kept_before_their_temperature() -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    cache = torch.zeros(4, 2, 12)
    gumbel_sample(
        logits,
        torch.tensor([3, -1, 0], dtype=torch.int32),
        torch.full((4,), 0.5),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        apply_temperature=True,
        is_drafting=True,
        logits_cache=cache,
        logits_cache_col=torch.tensor(1),
    )
    expected = torch.zeros(4, 2, 12)
    expected[3, 1, :10], expected[0, 1, :10] = logits[0], logits[2]
    assert torch.equal(cache, expected)


def test_temperatures_divide_logits_in_place() -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    expected = logits / torch.tensor([2.0, 1.0, 1.0])[:, None]
    apply_temperature(logits, torch.tensor([1, 0, 2], dtype=torch.int32), torch.tensor([0.0, 2.0, 1.0]))
    torch.testing.assert_close(logits, expected)


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
