"""Drafts from n-grams, and the inputs of draft models."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import (
    prepare_prefill_inputs as prepare_standalone,
)
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    prepare_decode_inputs,
    update_draft_inputs,
)
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    prepare_prefill_inputs as prepare_dependent,
)

Kernel = Callable[[str], Any]
NUM_DRAFTS, MAX_LENGTH, MAX_REQUESTS = 3, 24, 4


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def looked_up(text: list[int], low: int, high: int) -> list[int]:
    """Return what followed the last occurrence of the longest end of a text that occurred before."""
    for size in range(min(high, len(text) - 1), low - 1, -1):
        for place in range(len(text) - size - 1, -1, -1):
            if text[place : place + size] == text[-size:]:
                found = text[place + size : place + size + NUM_DRAFTS]
                return found + [text[-1]] * (NUM_DRAFTS - len(found))
    return [text[-1]] * NUM_DRAFTS


@pytest.mark.parametrize(("low", "high"), [(1, 3), (2, 4)])
def test_n_grams_are_looked_up_in_the_text(kernel: Kernel, low: int, high: int) -> None:
    draw = random.Random(5)
    texts = [[draw.randrange(3) for _ in range(draw.randint(1, MAX_LENGTH))] for _ in range(40)]
    num = len(texts)
    ids = torch.zeros(num, MAX_LENGTH, dtype=torch.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = int32(*text)
    requests = torch.randperm(num, generator=torch.Generator().manual_seed(1))
    lengths, num_sampled = int32(*(len(one) for one in texts)), torch.ones(num, dtype=torch.int32)
    num_sampled[7] = 0
    last = torch.tensor([one[-1] for one in texts])
    scratch, drafts = torch.ones(num, 3, dtype=torch.int64), torch.zeros(num, NUM_DRAFTS, dtype=torch.int64)
    shared = [ids, MAX_LENGTH, requests, lengths, num_sampled]
    kernel("gpu.spec_decode.ngram.speculator:_ngram_scan_kernel")[num, 3](
        *shared, scratch, 3, MAX_LENGTH, low, high, 4, 8
    )
    kernel("gpu.spec_decode.ngram.speculator:_ngram_finalize_kernel")[num,](
        *shared, last, scratch, 3, drafts, MAX_LENGTH, 3, NUM_DRAFTS, 4, 4
    )
    for row, request in enumerate(requests.tolist()):
        text = texts[request]
        assert drafts[row].tolist() == (looked_up(text, low, high) if row != 7 else [text[-1]] * NUM_DRAFTS)


def batch() -> SimpleNamespace:
    """Two requests of four and two tokens; the first refused two drafts."""
    return SimpleNamespace(
        num_reqs=2,
        num_tokens=6,
        query_start_loc_np=torch.tensor([0, 4, 6]).numpy(),
        query_start_loc=int32(0, 4, 6),
        seq_lens=int32(14, 7),
        input_ids=int32(11, 12, 13, 14, 21, 22),
        positions=torch.tensor([10, 11, 12, 13, 5, 6]),
        idx_mapping=int32(3, 1),
    )


def buffers() -> SimpleNamespace:
    return SimpleNamespace(
        input_ids=torch.full((8,), -1, dtype=torch.int32),
        positions=torch.full((8,), -1),
        query_start_loc=torch.full((MAX_REQUESTS + 1,), -1, dtype=torch.int32),
        seq_lens=torch.full((MAX_REQUESTS,), -1, dtype=torch.int32),
    )


def test_an_independent_draft_model_gets_the_sampled_token_after_the_accepted_ones() -> None:
    target, last_indices = buffers(), torch.full((MAX_REQUESTS,), -1)
    num = prepare_standalone(
        target,
        batch(),
        torch.tensor([90, 91, 92, 93]).view(-1, 1),
        torch.tensor([2, 0]),
        target.input_ids,
        target.positions,
        last_indices,
        MAX_REQUESTS,
        13,
    )
    assert num == 8
    assert target.input_ids.tolist() == [11, 12, 93, 0, 0, 21, 22, 91]
    assert target.positions.tolist() == [10, 11, 12, 12, 12, 5, 6, 7]
    assert target.query_start_loc.tolist() == [0, 5, 8, 8, 8]
    assert target.seq_lens.tolist() == [13, 8, 0, 0]
    assert last_indices.tolist() == [2, 7, 0, 0]


def test_a_dependent_draft_model_gets_each_next_token() -> None:
    target, step, last_indices = buffers(), torch.tensor(2), torch.full((MAX_REQUESTS,), -1)
    prepare_dependent(
        last_indices,
        step,
        target,
        batch(),
        int32(2, 0),
        int32(2, 0),
        torch.tensor([90, 91, 92, 93]).view(-1, 1),
        int32(80, 81, 82, 83),
        MAX_REQUESTS,
    )
    assert target.input_ids.tolist() == [12, 93, -1, -1, 22, 81, -1, -1]
    assert target.positions.tolist() == [10, 11, -1, -1, 5, 6, -1, -1]
    assert target.query_start_loc.tolist() == [0, 4, 6, 6, 6]
    assert target.seq_lens.tolist() == [14, 7, 0, 0]
    assert (last_indices.tolist(), step.item()) == ([1, 5, 0, 0], 0)


def test_each_draft_is_the_input_of_the_next() -> None:
    target = buffers()
    target.positions[:2] = torch.tensor([11, 12])
    sources = torch.tensor([11, 12, 0, 0])
    drafts = torch.tensor([[5, 0, 0], [6, 0, 0]])
    prepare_decode_inputs(drafts, int32(14, 13), int32(2, 0), target, sources, 13, MAX_REQUESTS)
    assert target.input_ids[:2].tolist() == [5, 6]
    assert target.positions[:2].tolist() == [12, 12]  # the last one there is
    assert target.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert target.seq_lens.tolist() == [13, 13, 0, 0]
    assert sources.tolist() == [12, 13, 0, 0]

    out, states = torch.zeros(MAX_REQUESTS, 3, dtype=torch.int64), torch.zeros(4, 2)
    hidden = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    target.positions[:2], target.seq_lens[:2] = torch.tensor([3, 12]), int32(4, 13)
    arguments = [hidden, out, states, target, sources, 2, 13, 3]
    update_draft_inputs(torch.tensor([7, 8]), torch.tensor(1), *arguments)
    assert out.tolist() == [[0, 7, 0], [0, 8, 0], [0, 0, 0], [0, 0, 0]]
    assert target.input_ids[:2].tolist() == [7, 8]
    assert target.positions[:2].tolist() == [4, 12]
    assert target.seq_lens.tolist() == [5, 13, 0, 0]
    assert (sources.tolist(), states[:2].tolist()) == ([13, 14, 0, 0], hidden.tolist())
    update_draft_inputs(torch.tensor([9, 9]), torch.tensor(2), *arguments)  # the last one
    assert out[:2].tolist() == [[0, 7, 9], [0, 8, 9]]
    assert target.input_ids[:2].tolist() == [7, 8]
