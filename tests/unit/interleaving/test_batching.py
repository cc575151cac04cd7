"""Rows of a batch: each invoke sees and replaces its own, and nobody else's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nnsight_engine.interleaving.batching import Batcher, BatchGroup


def batcher_of(value: Any, *groups: BatchGroup) -> Batcher:
    batcher = Batcher()
    batcher.groups = list(groups)
    batcher.total_batch_size = sum(num_rows for _, num_rows in groups)
    batcher.current_value = value
    return batcher


FIRST, SECOND = (0, 2), (2, 3)


def rows(width: int = 1) -> torch.Tensor:
    return torch.arange(5.0).unsqueeze(1).expand(5, width).clone()


# Seeing.


def test_invoke_sees_its_rows_as_a_view() -> None:
    batcher = batcher_of(rows(), FIRST, SECOND)
    assert batcher.narrow(FIRST).flatten().tolist() == [0, 1]
    assert batcher.narrow(SECOND).flatten().tolist() == [2, 3, 4]
    batcher.narrow(SECOND)[0] = 9
    assert batcher.current_value.flatten().tolist() == [0, 1, 9, 3, 4]


@pytest.mark.parametrize("groups", [(None, FIRST, SECOND), ((0, 5), (0, 5))])
def test_an_empty_invoke_and_the_only_one_see_the_very_value(groups: tuple[BatchGroup | None, ...]) -> None:
    value, (mine, *others) = rows(), groups
    batcher = batcher_of(value, *[group for group in others if group is not None])
    assert batcher.narrow(mine) is value


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    name: str
    states: tuple[torch.Tensor, ...]


def test_rows_are_narrowed_in_any_container() -> None:
    value = Output(rows(), "kept", (rows(2), torch.zeros(7), torch.tensor(1.0)))
    narrowed = batcher_of(value, FIRST, SECOND).narrow(SECOND)
    assert type(narrowed) is Output
    assert narrowed.logits.shape == (3, 1)
    assert narrowed.name == "kept"
    assert [tuple(state.shape) for state in narrowed.states] == [(3, 2), (7,), ()]
    args = ((rows(), [rows(), {"a": rows()}]), {"mask": rows(), "flag": True})
    (first, (second, third)), kwargs = batcher_of(args, FIRST, SECOND).narrow(FIRST)
    assert [len(one) for one in (first, second, third["a"], kwargs["mask"])] == [2] * 4
    assert kwargs["flag"] is True


# Replacing.


def test_empty_invoke_replaces_everything_even_with_another_type() -> None:
    batcher = batcher_of(rows(), FIRST, SECOND)
    batcher.swap(None, "anything")
    assert batcher.current_value == "anything"


def test_swap_keeps_the_values_dtype_and_device() -> None:
    batcher = batcher_of(rows().to(torch.bfloat16), FIRST, SECOND)
    batcher.swap(FIRST, torch.zeros(2, 1, dtype=torch.float64))
    assert batcher.current_value.dtype is torch.bfloat16


def test_swap_of_a_tree_replaces_each_tensors_rows() -> None:
    batcher = batcher_of((rows(), {"a": rows(2)}), FIRST, SECOND)
    batcher.swap(SECOND, (torch.zeros(3, 1), {"a": torch.ones(3, 2)}))
    first, second = batcher.current_value
    assert first.flatten().tolist() == [0, 1, 0, 0, 0]
    assert second["a"].tolist() == [[0, 0], [1, 1], [1, 1], [1, 1], [1, 1]]


@pytest.mark.parametrize(
    "replacement",
    [torch.zeros(5, 1), torch.zeros(3, 1), torch.zeros(1), torch.zeros(2, 2), torch.tensor(0.0)],
    ids=["the whole batch's", "another invoke's", "fewer dimensions", "wider", "a scalar"],
)
def test_swap_of_rows_that_do_not_fit_says_what_would(replacement: torch.Tensor) -> None:
    batcher = batcher_of(rows(), FIRST, SECOND)
    with pytest.raises(ValueError, match=r"owns 2 of 5 rows, so the value must be of shape \(2, 1\)"):
        batcher.swap(FIRST, replacement)
    assert batcher.current_value.flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("replacement", [(torch.zeros(2, 1),), "text", None, {"a": torch.zeros(2, 1)}])
def test_swap_of_another_structure_is_refused(replacement: Any) -> None:
    batcher = batcher_of(rows(), FIRST, SECOND)
    with pytest.raises(ValueError, match=r"."):
        batcher.swap(FIRST, replacement)


def test_swap_of_what_all_invokes_share_is_refused() -> None:
    shared = torch.zeros(4)
    batcher = batcher_of((rows(), shared), FIRST, SECOND)
    batcher.swap(FIRST, (torch.zeros(2, 1), shared))
    with pytest.raises(ValueError, match=r"belongs to all invokes together.*tracer\.invoke\(\)"):
        batcher.swap(FIRST, (torch.zeros(2, 1), torch.ones(4)))


def test_values_of_the_wrong_number_of_rows_are_not_joined() -> None:
    batcher = batcher_of(None, (0, 2), (2, 2))
    with pytest.raises(
        ValueError, match=r"owns 2 of 4 rows, so the value must be of shape \(2, 5\), got \(1, 5\)"
    ):
        batcher.join([torch.zeros(1, 5), torch.zeros(3, 5)])


def test_an_edit_in_place_survives_a_neighbours_assignment() -> None:
    batcher = batcher_of(rows(), FIRST, SECOND)
    mine = batcher.narrow(FIRST)
    batcher.swap(SECOND, torch.full_like(batcher.narrow(SECOND), 7.0))
    mine[:] = 3
    batcher.settle()
    assert torch.equal(batcher.narrow(FIRST), mine)
    assert batcher.narrow(SECOND).unique().tolist() == [7]


def test_a_gradient_survives_a_neighbours_assignment() -> None:
    batcher = batcher_of(rows().requires_grad_() * 1, FIRST, SECOND)
    mine = batcher.narrow(FIRST)
    batcher.swap(SECOND, torch.zeros_like(batcher.narrow(SECOND)))
    batcher.settle()
    (gradient,) = torch.autograd.grad(batcher.current_value.sum(), mine)
    assert torch.equal(gradient, torch.ones_like(mine))


def test_an_edit_of_what_belongs_to_all_is_an_error() -> None:
    batcher = batcher_of(torch.zeros(99, 1), FIRST, SECOND)
    batcher.narrow(FIRST)[0] = 1
    with pytest.raises(ValueError, match="is shared by all invokes"):
        batcher.reclaim()


def test_a_tensor_put_into_a_dict_takes_the_others_place() -> None:
    batcher = batcher_of({"a": rows()}, FIRST, SECOND)
    mine = batcher.narrow(FIRST)
    mine["a"] = torch.full_like(mine["a"], 9.0)
    batcher.reclaim()
    assert torch.equal(batcher.narrow(FIRST)["a"], mine["a"])
    assert torch.equal(batcher.narrow(SECOND)["a"], rows().narrow(0, *SECOND))


# Gradients.


def test_nothing_is_rejoined_without_gradients() -> None:
    value = rows()
    batcher = batcher_of(value, FIRST, SECOND)
    batcher.narrow(FIRST)
    batcher.settle()
    assert batcher.current_value is value
