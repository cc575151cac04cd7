"""Changes of logits and reports of them, compared with loops over rows and tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words
from vllm.v1.worker.gpu.sample.logit_bias import apply_logit_bias
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs, compute_topk_scores
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors
from vllm.v1.worker.gpu.sample.penalties import apply_penalties, bincount
from vllm.v1.worker.gpu.sample.trace_replay import apply_trace_tokens

Kernel = Callable[[str], Any]
VOCABULARY = 70
REQUESTS = torch.tensor([2, 0, 0, 0, 1], dtype=torch.int32)
"""The request of each logits row; the second request of the batch has two drafts."""
PLACES = torch.tensor([0, 0, 1, 2, 0], dtype=torch.int32)
TOKENS = torch.tensor([9, 4, 5, 69, 7], dtype=torch.int32)
"""The last sampled token or draft at each logits row."""


def logits(seed: int = 1) -> torch.Tensor:
    return 3 * torch.randn(len(REQUESTS), VOCABULARY, generator=torch.Generator().manual_seed(seed))


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_penalties_are_those_of_prompt_text_and_drafts() -> None:
    draw = random.Random(1)
    texts = [[draw.randrange(VOCABULARY) for _ in range(num)] for num in (30, 12, 20)]
    prompt_lens = [20, 12, 5]
    ids = torch.zeros(3, 40, dtype=torch.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    mask = torch.full((3, 3), -1, dtype=torch.int32)
    counts = torch.full((3, VOCABULARY), 7, dtype=torch.int32)
    prefill_lens = int32(*(len(one) for one in texts))
    bincount(int32(2, 0, 1), ids, int32(*prompt_lens), prefill_lens, mask, counts, 30)
    repetition, frequency, presence = [1.3, 1.0, 0.7], [0.4, 0.0, 0.0], [0.0, 0.0, -0.6]
    given = logits()
    got = given.clone()
    penalties = (torch.tensor(one) for one in (repetition, frequency, presence))
    apply_penalties(got, REQUESTS, TOKENS, PLACES, *penalties, mask, counts)

    for row, (request, place) in enumerate(zip(REQUESTS.tolist(), PLACES.tolist(), strict=True)):
        prompt, output = texts[request][: prompt_lens[request]], texts[request][prompt_lens[request] :]
        output = output + TOKENS[row - place + 1 : row + 1].tolist()
        for token in range(VOCABULARY):
            value = given[row, token].item()
            if token in prompt or token in output:
                value = value / repetition[request] if value > 0 else value * repetition[request]
            value -= frequency[request] * output.count(token) + presence[request] * (token in output)
            assert got[row, token].item() == pytest.approx(value, abs=1e-5), (row, token)


def test_unlikely_tokens_are_excluded() -> None:
    given, min_p = logits(), torch.tensor([0.3, 0.0, 0.05])
    got = given.clone()
    apply_min_p(got, REQUESTS, min_p)
    shares = given.softmax(-1) / given.softmax(-1).amax(-1, keepdim=True)
    assert torch.equal(got, given.masked_fill(shares < min_p[REQUESTS][:, None], -torch.inf))
    assert got[4].isfinite().all()


def test_bad_words_are_excluded_after_their_beginnings() -> None:
    ids = torch.zeros(3, 12, dtype=torch.int32)
    ids[0, :6] = int32(1, 2, 3, 8, 6, 4)  # a prompt of two tokens, then the last sampled one
    ids[1, :3], ids[2, :4] = int32(1, 2, 7), int32(1, 2, 3, 9)
    words = [
        [[60], [6, 4, 61], [4, 5, 62], [5, 69, 63], [2, 3, 8, 6, 4, 64], [3, 65]],
        [],
        [[3, 9, 66], [9, 3, 67]],
    ]
    tokens, offsets = torch.zeros(3, 30, dtype=torch.int32), torch.zeros(3, 8, dtype=torch.int32)
    for row, own in enumerate(words):
        flat = [token for word in own for token in word]
        tokens[row, : len(flat)] = int32(*flat)
        offsets[row, 1 : len(own) + 1] = int32(*np.cumsum([len(word) for word in own]).tolist())
    given = logits()
    got = given.clone()
    nums = int32(*(len(one) for one in words))
    apply_bad_words(
        got, REQUESTS, tokens, offsets, nums, ids, int32(2, 2, 2), int32(6, 3, 4), TOKENS, PLACES, 6
    )
    excluded = [(got[row] != given[row]).nonzero().view(-1).tolist() for row in range(5)]
    # A word does not begin in the prompt: [2, 3, 8, …] excludes nothing.
    assert excluded == [[66], [60, 61], [60, 62], [60, 63], []]


def test_tokens_are_allowed_preferred_and_kept_from_stopping() -> None:
    given = logits()
    got = given.clone()
    apply_logit_bias(
        got,
        REQUESTS,
        torch.tensor([9, 9, 10, 11, 9]),
        int32(0, 2, 0),
        torch.stack([int32(0, 0), int32(3, 5), int32(0, 0)]),
        int32(1, 0, 2),
        torch.stack([int32(8, 0), int32(0, 0), int32(1, 2)]),
        torch.tensor([[2.5, 0.0], [0.0, 0.0], [-100.0, 1.0]]),
        int32(12, 20, 0),
        int32(2, 2, 1),
        torch.tensor([0, 1, 0]),
        torch.stack([int32(6, 7), int32(3, 5), int32(9, 9)]),
        check_all_masked_rows=True,
    )
    expected = given.clone()
    expected[0, 1] -= 100
    expected[0, 2] += 1
    expected[1:4, 8] += 2.5
    expected[1:3, 6:8] = -torch.inf  # the third row is at the shortest length
    kept = expected[4, [3, 5]].clone()  # all allowed tokens would stop, and are given back
    expected[4] = -torch.inf
    expected[4, [3, 5]] = kept
    torch.testing.assert_close(got, expected)


def test_a_grammar_excludes_tokens_by_row(kernel: Kernel) -> None:
    given = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(2))
    draw = torch.Generator().manual_seed(3)
    masks = torch.randint(-(2**31), 2**31, (3, 3), generator=draw, dtype=torch.int64).int()
    got = given.clone()
    # Places 0 and 2 of the second request, and place 1 of the first, which has one row.
    kernel("gpu.structured_outputs:_apply_grammar_bitmask_kernel")[3, 1](
        got, VOCABULARY, int32(4, 6, 1), int32(0, 1, 4), masks, 3, VOCABULARY, MASK_STRIDE=4, BLOCK_SIZE=128
    )
    expected = given.clone()
    for row, mask in ((1, masks[0]), (3, masks[1])):
        for token in range(VOCABULARY):
            if not int(mask[token // 32]) >> token % 32 & 1:
                expected[row, token] = -torch.inf
    assert torch.equal(got, expected)


def test_logprobs_and_ranks() -> None:
    given = logits()
    given[2, :30] = -torch.inf
    sampled = torch.tensor([5, 6, 40, 8, 9])
    got = compute_topk_scores(given, 3, sampled)
    best = given.topk(3).indices
    assert torch.equal(got.logprob_token_ids, torch.cat([sampled[:, None], best], 1))
    expected = given.double().log_softmax(-1).gather(1, got.logprob_token_ids).float()
    torch.testing.assert_close(got.logprobs, expected)
    assert got.selected_token_ranks.tolist() == [
        sum(value >= given[row, token] for value in given[row].tolist())
        for row, token in enumerate(sampled.tolist())
    ]
    assert compute_token_logprobs(given[:0], best[:0]).shape == (0, 3)


def test_a_request_s_own_tokens_replace_the_best_ones(kernel: Kernel) -> None:
    ids, is_valid = torch.zeros(5, 4, dtype=torch.int64), torch.zeros(5, 4, dtype=torch.bool)
    best = torch.arange(10, 20, dtype=torch.int32).view(5, 2)
    own = torch.stack([int32(0, 0, 0), int32(31, 32, 33), int32(41, 0, 0)])
    kernel("gpu.sample.logprob:_fill_logprob_token_ids_kernel")[5,](
        ids,
        4,
        is_valid,
        4,
        torch.arange(5),
        best,
        2,
        REQUESTS,
        int32(0, 3, 1),
        own,
        3,
        NUM_TOPK=2,
        PADDED_COLS=4,
    )
    assert ids.tolist() == [[0, 41, 0, 0], [1, 12, 13, 0], [2, 14, 15, 0], [3, 16, 17, 0], [4, 31, 32, 33]]
    assert is_valid.sum(-1).tolist() == [2, 3, 3, 3, 4]


@pytest.mark.parametrize("max_num_kept", [4, 50])
def test_the_tokens_that_could_be_sampled(max_num_kept: int) -> None:
    given = logits()
    given[given < 2] = -torch.inf
    # Three requests with one, three and one row, of which the first samples none and the second two.
    got = SamplingMaskTensors.from_logits(
        given, int32(0, 1, 4, 5), int32(0, 2, 1), max_num_kept, rows_per_request=3
    )
    lists = got.tolists(np.array([0, 2, 1]))
    expected = [given[row].isfinite().nonzero().view(-1).tolist() for row in (1, 2, 4)]
    assert lists[0].tolist() == [token for one in expected for token in one]
    assert lists[1].tolist() == np.cumsum([0, *(len(one) for one in expected)]).tolist()


def test_given_tokens_replace_sampled_ones() -> None:
    sampled = torch.tensor([90, 91, 92, 93])
    traces = torch.arange(20, dtype=torch.int32).view(4, 5)
    apply_trace_tokens(
        sampled, int32(3, 0, 1, -1), traces, int32(1, 5, 0, 5), int32(8, 4, 9, 9), int32(7, 4, 9, 6)
    )
    assert sampled.tolist() == [18, 91, 5, 93]
