"""What can be passed to a language model, and how rows of unlike length become one tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from nnsight_engine.modeling.rows import (
    Filling,
    filling_of,
    join_rows,
    positions,
    read_rows,
)
from tests.families.checkpoints import build_tokenizer

LEFT = Filling(token=9, side="left")
RIGHT = Filling(token=9, side="right")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = build_tokenizer()
    tokenizer.padding_side = "left"
    return tokenizer


@pytest.mark.parametrize(
    "given",
    [
        [1, 2, 3],
        (1, 2, 3),
        [[1, 2, 3]],
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]]),
        [torch.tensor([1, 2, 3])],
        [torch.tensor(1), torch.tensor(2), torch.tensor(3)],
        np.array([1, 2, 3]),
        [np.int64(1), np.int64(2), np.int64(3)],
    ],
)
def test_one_row_of_token_ids_in_any_form(tokenizer: PreTrainedTokenizerBase, given: Any) -> None:
    rows = read_rows(tokenizer, {"input_ids": given})
    assert rows["input_ids"].tolist() == [[1, 2, 3]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    "given", [[[1, 2, 3], [4]], [torch.tensor([1, 2, 3]), torch.tensor([4])], [(1, 2, 3), np.array([4])]]
)
def test_rows_of_unlike_length_are_filled_and_masked(tokenizer: PreTrainedTokenizerBase, given: Any) -> None:
    rows = read_rows(tokenizer, {"input_ids": given})
    assert rows["input_ids"].tolist() == [[1, 2, 3], [0, 0, 4]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_what_a_tokenizer_returns_is_taken_as_it_is(tokenizer: PreTrainedTokenizerBase) -> None:
    encoded = tokenizer([" Rome", " Rome is good"], padding=True, return_tensors="pt")
    rows = read_rows(tokenizer, dict(encoded))
    assert torch.equal(rows["input_ids"], encoded["input_ids"])
    assert torch.equal(rows["attention_mask"], encoded["attention_mask"])


def test_labels_are_ignored_where_rows_are_filled(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = read_rows(tokenizer, {"input_ids": [" Rome", " Rome is"], "labels": [" Paris", " Paris is"]})
    paris = tokenizer(" Paris")["input_ids"][0]
    assert rows["labels"][0].tolist() == [-100, paris]


def test_embeddings_make_rows(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = read_rows(tokenizer, {"inputs_embeds": [torch.ones(1, 3, 4), torch.ones(2, 4)]})
    assert rows["inputs_embeds"].shape == (2, 3, 4)
    assert rows["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize("given", ["", [], torch.tensor([]), [[1], []]])
def test_no_tokens_are_refused(tokenizer: PreTrainedTokenizerBase, given: Any) -> None:
    with pytest.raises(ValueError, match="at least one row and one token"):
        read_rows(tokenizer, {"input_ids": given})


@pytest.mark.parametrize("given", [["text", 1], object(), [1.5], torch.rand(1, 3), {1, 2}])
def test_what_is_no_input_is_refused(tokenizer: PreTrainedTokenizerBase, given: Any) -> None:
    with pytest.raises(TypeError, match="input_ids must be"):
        read_rows(tokenizer, {"input_ids": given})


def test_an_input_without_tokens_names_what_it_has(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="got attention_mask"):
        read_rows(tokenizer, {"attention_mask": [[1]]})


def test_filling_uses_the_end_token_where_there_is_none(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.pad_token = None
    assert filling_of(tokenizer) == Filling(token=tokenizer.eos_token_id, side="left")


def _rows(ids: list[list[int]], **others: Any) -> dict[str, torch.Tensor]:
    tokens = torch.tensor(ids)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **others}


def test_rows_are_joined_on_the_side_that_is_filled() -> None:
    first, second = _rows([[1, 2, 3]]), _rows([[4], [5]])
    assert join_rows(LEFT, first, second)["input_ids"].tolist() == [[1, 2, 3], [9, 9, 4], [9, 9, 5]]
    assert join_rows(RIGHT, second, first)["input_ids"].tolist() == [[4, 9, 9], [5, 9, 9], [1, 2, 3]]
    assert join_rows(LEFT, second, first)["attention_mask"].tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 1]]


def test_joining_supplies_what_one_invoke_left_out() -> None:
    first = _rows([[1, 2]], labels=torch.tensor([[1, 2]]), token_type_ids=torch.tensor([[1, 1]]))
    joined = join_rows(LEFT, first, _rows([[4]]))
    assert joined["labels"].tolist() == [[1, 2], [-100, -100]]
    assert joined["token_type_ids"].tolist() == [[1, 1], [0, 0]]


def test_joining_refuses_tokens_with_embeddings() -> None:
    first = _rows([[1, 2]])
    second = {"inputs_embeds": torch.ones(1, 2, 4), "attention_mask": torch.ones(1, 2)}
    with pytest.raises(ValueError, match="input_ids"):
        join_rows(LEFT, first, second)


def test_positions_count_the_tokens_that_are_not_masked() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
    assert positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 1, 0, 0]]
