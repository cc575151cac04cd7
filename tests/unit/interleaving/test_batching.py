"""Rows of a batch: each invoke sees and replaces its own, and nobody else's."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nnsight_engine.interleaving.batching import Batchable, Batcher, BatchGroup
from nnsight_engine.interleaving.mediator import Mediator

if TYPE_CHECKING:
    from tests.unit.interleaving.conftest import Scene


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


def test_empty_invoke_sees_the_very_value() -> None:
    value = rows()
    batcher = batcher_of(value, FIRST, SECOND)
    assert batcher.narrow(None) is value


def test_only_invoke_sees_the_very_value() -> None:
    value = rows()
    batcher = batcher_of(value, (0, 5))
    assert batcher.narrow((0, 5)) is value


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


def test_tensors_of_another_length_are_shared() -> None:
    value = (torch.zeros(4, 2), torch.zeros(5))
    narrowed = batcher_of(value, FIRST, SECOND).narrow(FIRST)
    assert narrowed[0] is value[0]
    assert narrowed[1].shape == (2,)


# Replacing.


def test_swap_replaces_only_the_invokes_rows_in_a_new_tensor() -> None:
    value = rows()
    batcher = batcher_of(value, FIRST, SECOND)
    batcher.swap(FIRST, torch.tensor([[8.0], [9.0]]))
    assert batcher.current_value.flatten().tolist() == [8, 9, 2, 3, 4]
    assert value.flatten().tolist() == [0, 1, 2, 3, 4], "what was saved before keeps its numbers"


def test_swaps_of_all_invokes_come_together() -> None:
    batcher = batcher_of(rows(), FIRST, SECOND)
    batcher.swap(SECOND, torch.full((3, 1), 7.0))
    batcher.swap(FIRST, torch.full((2, 1), 6.0))
    assert batcher.current_value.flatten().tolist() == [6, 6, 7, 7, 7]
    assert batcher.narrow(SECOND).flatten().tolist() == [7, 7, 7]


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


def test_values_of_invokes_are_joined_in_order() -> None:
    batcher = batcher_of(None, (0, 1), (1, 2))
    joined = batcher.join([(torch.zeros(1, 2), "x"), (torch.ones(2, 2), "x")])
    assert joined[0].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert joined[1] == "x"


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


def test_gradients_flow_through_an_invokes_rows() -> None:
    """Its view takes part in the model's path, so that a gradient of what the invoke read arrives there."""
    value = rows().requires_grad_() * 1
    batcher = batcher_of(value, FIRST, SECOND)
    mine = batcher.narrow(FIRST)
    assert batcher.narrow(FIRST) is mine, "the same view again"
    batcher.settle()
    (gradient,) = torch.autograd.grad(batcher.current_value.sum() * 3, mine)
    assert gradient.flatten().tolist() == [3, 3]


def test_nothing_is_rejoined_without_gradients() -> None:
    value = rows()
    batcher = batcher_of(value, FIRST, SECOND)
    batcher.narrow(FIRST)
    batcher.settle()
    assert batcher.current_value is value


# A batch out of invokes.


class Stacks(Batchable):
    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        return inputs, kwargs, len(inputs[0]) if inputs else 0

    def _batch(
        self, batched_input: tuple[tuple[Any, ...], dict[str, Any]], *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, others = batched_input
        return (torch.cat([args[0], inputs[0]]),), {**others, **kwargs}


def test_invokes_get_rows_in_the_order_in_which_they_are_added() -> None:
    batcher = Batcher()
    model = Stacks()
    assert batcher.add(model, (torch.zeros(2, 1),), {}) == (0, 2)
    assert batcher.add(model, (), {}) is None
    assert batcher.add(model, (torch.ones(3, 1),), {"more": 1}) == (2, 3)
    assert batcher.inputs is not None
    (together,), kwargs = batcher.inputs
    assert together.flatten().tolist() == [0, 0, 1, 1, 1]
    assert kwargs == {"more": 1}
    assert batcher.total_batch_size == 5


def test_model_that_cannot_batch_takes_one_input() -> None:
    batcher = Batcher()
    model = Batchable()
    batcher.add(model, (torch.zeros(2, 1),), {})
    assert batcher.add(model, (), {}) is None
    with pytest.raises(NotImplementedError, match="Batching is not implemented for Batchable"):
        batcher.add(model, (torch.zeros(2, 1),), {})


# In a run.


def test_invokes_read_and_replace_their_own_rows(scene: Scene) -> None:
    @scene.rows(0, 2)
    def first(mediator: Mediator) -> None:
        scene.log.append(mediator.request("a.i0").flatten().tolist())
        mediator.swap("a.i0", torch.full((2, 1), -1.0))

    @scene.rows(2, 3)
    def second(mediator: Mediator) -> None:
        scene.log.append(mediator.request("a.i0").flatten().tolist())

    (left,) = scene.provide(("a", rows()))
    assert scene.log == [[0, 1], [2, 3, 4]]
    assert left.flatten().tolist() == [-1, -1, 2, 3, 4]


def test_rows_that_do_not_fit_are_an_error_in_the_block_at_its_line(scene: Scene) -> None:
    @scene.rows(0, 2)
    def first(mediator: Mediator) -> None:
        with pytest.raises(ValueError, match="owns 2 of 5 rows"):
            mediator.swap("a.i0", torch.zeros(5, 1))
        mediator.swap("a.i0", torch.zeros(2, 1))

    @scene.rows(2, 3)
    def second(mediator: Mediator) -> None:
        mediator.request("a.i0")

    (left,) = scene.provide(("a", rows()))
    assert left.flatten().tolist() == [0, 0, 2, 3, 4]


def test_edits_in_place_of_one_invoke_are_not_seen_by_another(scene: Scene) -> None:
    @scene.rows(0, 2)
    def first(mediator: Mediator) -> None:
        mediator.request("a.i0").mul_(100)

    @scene.rows(2, 3)
    def second(mediator: Mediator) -> None:
        scene.log.append(mediator.request("a.i0").flatten().tolist())

    @scene.block
    def empty(mediator: Mediator) -> None:
        scene.log.append(mediator.request("a.i0").flatten().tolist())

    scene.provide(("a", rows()))
    assert scene.log == [[2, 3, 4], [0, 100, 2, 3, 4]]


def test_values_that_hold_no_tensors_are_the_same_for_every_invoke(scene: Scene) -> None:
    marker = object()

    @scene.rows(0, 2)
    def first(mediator: Mediator) -> None:
        scene.log.append(mediator.request("a.i0"))

    @scene.rows(2, 3)
    def second(mediator: Mediator) -> None:
        scene.log.append(mediator.request("a.i0"))

    scene.provide(("a", OrderedDict(x=marker)))
    assert [value["x"] for value in scene.log] == [marker, marker]
