"""Kernels that sample, by noise from seed, position and token alone: the same in any batch, and on a GPU.

Of drafts they accept the first ones, and sample the token after them (Leviathan et al., 2023,
https://arxiv.org/abs/2211.17192). Where the temperature is zero, only the target's best token is accepted.
Without its logits, a draft has probability one. Logits of the target are divided by temperature already,
those of drafts are not.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch

from nnsight_engine.vllm_backend.cpu_kernels.ragged import lengths_of, rows_and_places

_MASK: Final = 0xFFFFFFFF
# Of MurmurHash3, with which vLLM's kernel makes the noise.
_KEY_FACTORS: Final = (0xCC9E2D51, 0x1B873593)
_MIX_ADDEND: Final = 0xE6546B64
_FINAL_FACTORS: Final = (0x85EBCA6B, 0xC2B2AE35)
_NUM_BYTES: Final = 16
"""Of which vLLM takes a hash: those of the seed, a position and a token."""
_DRAFT_OFFSET: Final = 1 << 30
"""Added to positions for drafts, whose noise must not be that of the sample they are compared with."""
_PHILOX_FACTORS: Final = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_PHILOX_ADDENDS: Final = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_PHILOX_ROUNDS: Final = 10
_UNIFORM_STEP: Final = 4.6566127342e-10
_CHUNK_ELEMENTS: Final = 1 << 18
"""Noise is made for so many elements at a time, which stay in the cache of a processor."""


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return float32 Gumbel noise, ``[rows, tokens]``, by a hash of each row's seed, position and token."""
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
    """Return a number between 0 and 1 for each row, as Triton's ``rand`` does, by the generator Philox."""
    # By numpy, whose operations on few numbers cost less than torch's.
    key, position = (tensor.long().numpy().astype(np.uint64) for tensor in (seeds, positions))
    key_0, key_1 = key & _MASK, key >> 32
    word_0, word_1 = position & _MASK, position >> 32
    word_2 = word_3 = np.zeros_like(position)
    for _ in range(_PHILOX_ROUNDS):
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
    best = torch.empty(len(logits), dtype=torch.int64)
    step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(logits), step):
        chunk = slice(start, start + step)
        is_warm, scores = temperatures[chunk] != 0, logits[chunk]
        if divides_by_temperature:
            scores = scores / torch.where(is_warm, temperatures[chunk], 1)[:, None]
        if is_warm.any():
            noise = gumbel_noise(seeds[chunk], positions[chunk], logits.shape[1])
            scores = scores + noise.masked_fill_(~is_warm[:, None], 0)
        torch.argmax(scores, -1, out=best[chunk])
    return best


def apply_temperature(
    *, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor
) -> None:
    temperatures = temperature[expanded_idx_mapping]
    if ((temperatures != 0) & (temperatures != 1)).any():
        logits.copy_(logits.float() / torch.where(temperatures == 0, 1, temperatures)[:, None])


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


def flatten_sampled(
    *,
    flat_sampled: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
) -> None:
    """Write each request's sampled tokens at its rows of logits."""
    rows, places = rows_and_places(num_sampled)
    flat_sampled[cu_num_logits[rows] + places] = sampled[rows, places]


def gather_draft_sampled(
    *,
    draft_sampled: torch.Tensor,
    pos: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    prefill_len: torch.Tensor,
) -> None:
    """Write the token and position of each logits row; -1 for drafts of a request within its prompt."""
    pos.copy_(positions[logits_indices])
    is_prompt = pos - expanded_local_pos < prefill_len[expanded_idx_mapping]
    draft_sampled.copy_(input_ids[logits_indices].masked_fill(is_prompt & (expanded_local_pos > 0), -1))


def reject(
    *,
    sampled: torch.Tensor,
    rejected_steps: torch.Tensor,
    target_rejected_logsumexp: torch.Tensor,
    draft_rejected_logsumexp: torch.Tensor,
    target_logits: torch.Tensor,
    draft_sampled: torch.Tensor,
    draft_logits: torch.Tensor | None,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temp: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    synthetic_conditional_rates: torch.Tensor | None,
) -> None:
    """Write how many drafts each request accepts, the accepted tokens, and where all is greedy the next one.

    ``rejected_steps`` gets the place of the first refused draft; the sums of exponentials there go to
    ``resample``.
    """
    num_reqs, num_steps = len(idx_mapping), sampled.shape[1] - 1
    if draft_logits is not None:
        target_logits = target_logits[:, : draft_logits.shape[-1]]
    starts = cu_num_logits[:num_reqs].long()
    num_drafts = lengths_of(cu_num_logits, num_reqs) - 1
    temperatures = temp[idx_mapping]
    is_greedy = (temperatures == 0)[:, None]
    steps = torch.arange(num_steps)
    target_rows = (starts[:, None] + steps).clamp(max=len(target_logits) - 1)
    tokens = draft_sampled[(target_rows + 1).clamp(max=len(draft_sampled) - 1)].long()
    is_draft = (steps < num_drafts[:, None]) & (tokens >= 0)
    tokens = tokens.clamp(min=0)
    best = target_logits.argmax(-1)[target_rows]
    is_accepted = tokens == best
    if not is_greedy.all() or synthetic_conditional_rates is not None:
        drawn = uniform(seed[idx_mapping][:, None].expand_as(target_rows), pos[target_rows])
    if not is_greedy.all():
        target_sums = target_logits.float().logsumexp(-1)
        ratios = target_logits[target_rows, tokens].float() - target_sums[target_rows]
        draft_sums = torch.zeros(target_rows.shape)
        if draft_logits is not None:
            proposed = (
                draft_logits[idx_mapping].float()
                / torch.where(is_greedy, 1, temperatures[:, None])[:, :, None]
            )
            draft_sums = proposed.logsumexp(-1)
            ratios = ratios - (proposed.gather(2, tokens[:, :, None])[:, :, 0] - draft_sums)
        is_accepted = torch.where(is_greedy, is_accepted, ratios > drawn.log())
    if synthetic_conditional_rates is not None:  # drafts are accepted at given rates, for measurements
        is_accepted = drawn < synthetic_conditional_rates
    is_accepted = is_accepted & is_draft
    num_accepted = is_accepted.long().cumprod(1).sum(1)
    sampled[:, :num_steps] = torch.where(is_greedy & ~is_accepted, best, tokens)
    rejected_steps.copy_(num_accepted)
    if not is_greedy.all():
        target_rejected_logsumexp.copy_(target_sums[starts + num_accepted])
        refused = num_accepted.clamp(max=num_steps - 1)[:, None]
        draft_rejected_logsumexp.copy_(draft_sums.gather(1, refused)[:, 0])


def resample(
    *,
    resampled_local_argmax: torch.Tensor,
    target_logits: torch.Tensor,
    target_rejected_logsumexp: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_rejected_logsumexp: torch.Tensor,
    rejected_step: torch.Tensor,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    draft_sampled: torch.Tensor,
    temp: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    vocab_size: int,
) -> None:
    """Sample the next token; after a refusal, from what the target has more than the draft."""
    num_reqs = len(rejected_step)
    target_rows = cu_num_logits[:num_reqs].long() + rejected_step
    requests = expanded_idx_mapping[target_rows]
    temperatures = temp[requests]
    is_bonus = target_rows == cu_num_logits[1 : num_reqs + 1] - 1
    refused = draft_sampled[(target_rows + 1).clamp(max=len(draft_sampled) - 1)].long()
    rows = (~is_bonus & (refused >= 0) & (temperatures != 0)).nonzero().view(-1)
    remaining = target_logits[target_rows, :vocab_size].float()
    if draft_logits is None:
        remaining[rows, refused[rows]] = -torch.inf
    elif len(rows):
        target = remaining[rows] - target_rejected_logsumexp[rows, None]
        proposed = draft_logits[requests[rows], rejected_step[rows], :vocab_size].float()
        draft = proposed / temperatures[rows, None] - draft_rejected_logsumexp[rows, None]
        ratio = (draft - target).exp()
        remaining[rows] = torch.where(ratio < 1, target + (-ratio).log1p(), -torch.inf)
    resampled_local_argmax[:, 0] = noised_argmax(remaining, temperatures, seed[requests], pos[target_rows])


def insert_resampled(
    *,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    resampled_local_argmax: torch.Tensor,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temp: torch.Tensor,
) -> None:
    """Write and count the token after the accepted drafts; after a refusal, greedy requests have it."""
    num_reqs = len(num_sampled)
    target_rows = cu_num_logits[:num_reqs].long() + num_sampled
    is_bonus = target_rows == cu_num_logits[1 : num_reqs + 1] - 1
    resampled_rows = ((temp[expanded_idx_mapping[target_rows]] != 0) | is_bonus).nonzero().view(-1)
    sampled[resampled_rows, num_sampled[resampled_rows].long()] = resampled_local_argmax[resampled_rows, 0]
    num_sampled += 1
