"""Sampling: the noise is vLLM's hash, and samples follow the distribution of the logits."""

from __future__ import annotations

import math

import pytest
import torch
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample

from nnsight_engine.vllm_backend.cpu_kernels.gumbel import gumbel_noise, uniform

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
