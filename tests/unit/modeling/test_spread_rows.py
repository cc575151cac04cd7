"""An invoke's rows where a run makes several of each, and what becomes of edits of them."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine.modeling.spread_rows import SpreadBatcher

FIRST, SECOND = (0, 1), (1, 2)


def batcher(copies: int = 1, num_blocks: int = 1) -> SpreadBatcher:
    """Return the batcher of two invokes of one row and of two."""
    made = SpreadBatcher()
    made.groups, made.total_batch_size = [FIRST, SECOND], 3
    made.copies, made.num_blocks = frozenset({1, copies}), num_blocks
    return made


def test_blocks_are_put_together_and_edits_of_them_put_back() -> None:
    rows = batcher(num_blocks=2)
    rows.current_value = whole = torch.arange(6)
    second = rows.narrow(SECOND)
    assert second.tolist() == [1, 2, 4, 5]
    second[0] = 10
    second[3] = 50
    assert rows.narrow(None).tolist() == [0, 10, 2, 3, 4, 50]  # who looks next sees them
    first = rows.narrow(FIRST)
    first += 100
    rows.settle()
    assert whole.tolist() == [100, 10, 2, 103, 4, 50]


def test_rows_that_were_lent_are_brought_up_to_date() -> None:
    rows = batcher(num_blocks=2)
    rows.current_value = whole = torch.arange(6)
    before = rows.narrow(SECOND)
    whole[:] = 7  # as an empty invoke does
    assert rows.narrow(SECOND) is before
    assert before.tolist() == [7, 7, 7, 7]
    rows.settle()
    assert whole.tolist() == [7] * 6


def test_edits_where_torch_does_not_count_changes() -> None:
    with torch.inference_mode():
        rows = batcher(num_blocks=2)
        rows.current_value = whole = torch.arange(6)
        rows.narrow(SECOND)[:] = 0
        rows.settle()
    assert whole.tolist() == [0, 0, 0, 3, 0, 0]


@pytest.mark.parametrize(("copies", "num_blocks"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_rows_are_replaced_where_they_are_read(copies: int, num_blocks: int) -> None:
    rows = batcher(copies, num_blocks)
    rows.current_value = whole = torch.arange(3 * copies * num_blocks)
    old = rows.narrow(SECOND).clone()
    rows.swap(SECOND, old + 100)
    assert rows.current_value is not whole
    assert torch.equal(rows.narrow(SECOND), old + 100)
    assert torch.equal(rows.narrow(FIRST), whole[~torch.isin(whole, old)])


def test_a_value_of_the_wrong_shape_is_refused() -> None:
    rows = batcher(num_blocks=2)
    rows.current_value = torch.zeros(6, 2)
    with pytest.raises(ValueError, match="4 of these 6 rows are this invoke's"):
        rows.swap(SECOND, torch.zeros(2, 2))


def test_what_is_nobodys_is_seen_whole() -> None:
    rows = batcher(copies=2, num_blocks=2)
    rows.current_value = table = torch.zeros(7, 2)
    assert rows.narrow(FIRST) is table
    with pytest.raises(ValueError, match="belongs to all invokes"):
        rows.swap(FIRST, torch.zeros(1, 2))


def test_values_for_a_skipped_module_are_joined_block_by_block() -> None:
    rows = batcher(num_blocks=2)
    assert rows.join([torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5])]).tolist() == [0, 1, 2, 3, 4, 5]
    assert batcher(copies=2).join([torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5])]).tolist() == list(
        range(6)
    )
