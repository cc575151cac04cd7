"""Kernels that sample, by noise from seed, position and token alone: the same in any batch, and on a GPU."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch

_MASK: Final = 0xFFFFFFFF
_KEY_FACTORS: Final = (0xCC9E2D51, 0x1B873593)
_MIX_ADDEND: Final = 0xE6546B64
_FINAL_FACTORS: Final = (0x85EBCA6B, 0xC2B2AE35)
_NUM_BYTES: Final = 16
"""Of which vLLM takes a hash: those of the seed, a position and a token."""
_DRAFT_OFFSET: Final = 1 << 30
"""Added to positions for drafts, whose noise must not be that of the sample they are compared with."""
_PHILOX_FACTORS: Final = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_PHILOX_ADDENDS: Final = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_UNIFORM_STEP: Final = 4.6566127342e-10
_CHUNK_ELEMENTS: Final = 1 << 18
"""Noise is made for so many elements at a time, which stay in the cache of a processor."""


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return float32 noise, ``[rows, tokens]``, from a seed and a position of each row."""
    value = _prefix(seeds, positions).to(torch.int32)[:, None] ^ _token_keys(num_tokens)
    spare = torch.empty_like(value)

    def right(bits: int) -> torch.Tensor:
        """Return the value shifted without regard to its sign, until the next call."""
        torch.bitwise_right_shift(value, bits, out=spare)
        return spare.bitwise_and_((1 << (32 - bits)) - 1)

    right(19)
    value.bitwise_left_shift_(13).bitwise_or_(spare).mul_(5).add_(_signed(_MIX_ADDEND)).bitwise_xor_(
        _NUM_BYTES
    )
    value.bitwise_xor_(right(16)).mul_(_signed(_FINAL_FACTORS[0]))
    value.bitwise_xor_(right(13)).mul_(_signed(_FINAL_FACTORS[1]))
    value.bitwise_xor_(right(16))
    high = right(16).float().mul_(2**-16)
    low = value.bitwise_and_(0xFFFF).float().add_(0.5).mul_(2**-32)
    below_one = high.add_(low).clamp_(max=1 - 2**-24)
    # Large noise decides, and comes from numbers near zero, of which float32 has many.
    return below_one.neg_().log1p_().neg_().log_().neg_()


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a number between 0 and 1 for each row, as Triton's ``rand`` does, by Philox of ten rounds."""
    # By numpy, whose operations on few numbers cost less than torch's.
    key, position = (one.long().numpy().astype(np.uint64) for one in (seeds, positions))
    key_0, key_1 = key & _MASK, key >> 32
    word_0, word_1 = position & _MASK, position >> 32
    word_2 = word_3 = np.zeros_like(position)
    for _ in range(10):
        product_0, product_2 = word_0 * _PHILOX_FACTORS[0], word_2 * _PHILOX_FACTORS[1]
        word_0, word_1 = product_2 >> 32 ^ word_1 ^ key_0, product_2 & _MASK
        word_2, word_3 = product_0 >> 32 ^ word_3 ^ key_1, product_0 & _MASK
        key_0, key_1 = key_0 + _PHILOX_ADDENDS[0] & _MASK, key_1 + _PHILOX_ADDENDS[1] & _MASK
    drawn = torch.from_numpy(word_0).to(torch.int32)
    return torch.where(drawn < 0, ~drawn, drawn).float().mul(_UNIFORM_STEP).clamp(min=_UNIFORM_STEP)


def noised_argmax(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    divides_by_temperature: bool = False,
) -> torch.Tensor:
    """Return a sampled token for each row of float32 logits; the best one where the temperature is zero."""
    if not temperatures.any():
        return logits.argmax(-1)
    found = torch.empty(len(logits), dtype=torch.int64)
    step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(logits), step):
        own = slice(start, start + step)
        is_warm, part = temperatures[own] != 0, logits[own]
        if divides_by_temperature:
            part = part / torch.where(is_warm, temperatures[own], 1)[:, None]
        if is_warm.any():
            noise = gumbel_noise(seeds[own], positions[own], logits.shape[1])
            part = part + noise.masked_fill_(~is_warm[:, None], 0)
        torch.argmax(part, -1, out=found[own])
    return found


def apply_temperature(
    *, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor
) -> None:
    own = temperature[expanded_idx_mapping]
    if ((own != 0) & (own != 1)).any():
        logits.copy_(logits.float() / torch.where(own == 0, 1, own)[:, None])


def gumbel_sample(
    *,
    local_argmax: torch.Tensor,
    local_max: torch.Tensor,
    logits_cache: torch.Tensor | None,
    logits_cache_col: torch.Tensor | None,
    logits_cache_source: torch.Tensor | None,
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    temp: torch.Tensor,
    vocab_size: int,
    is_drafting: bool,
    apply_temperature: bool,
) -> None:
    """Sample a token for each row, and keep the logits of drafts before their temperature.

    The kernel returns the best token of each block of the vocabulary; here the first block has the best.
    """
    requests = expanded_idx_mapping
    is_real = requests >= 0
    if logits_cache is not None and logits_cache_col is not None and logits_cache_source is not None:
        columns = logits_cache_col[is_real] if logits_cache_col.dim() else logits_cache_col
        logits_cache[requests[is_real], columns, :vocab_size] = logits_cache_source[is_real]
    local_max.fill_(-torch.inf)
    local_max[:, 0] = 0
    local_argmax[:, 0] = noised_argmax(
        logits.float(),
        torch.where(is_real, temp[requests], 0),
        seeds[requests],
        pos.long() + (_DRAFT_OFFSET if is_drafting else 0),
        divides_by_temperature=apply_temperature,
    )


def _signed(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number


def _rotated(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value << bits | value >> (32 - bits)) & _MASK


def _key(value: torch.Tensor) -> torch.Tensor:
    return _rotated(value * _KEY_FACTORS[0] & _MASK, 15) * _KEY_FACTORS[1] & _MASK


def _mixed(value: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (_rotated(value ^ _key(key), 13) * 5 + _MIX_ADDEND) & _MASK


def _prefix(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    seeds = seeds.long()
    value = _mixed(torch.zeros_like(seeds), seeds & _MASK)
    return _mixed(_mixed(value, seeds >> 32 & _MASK), positions.long() & _MASK)


@functools.cache
def _token_keys(num_tokens: int) -> torch.Tensor:
    return _key(torch.arange(num_tokens)).to(torch.int32)
