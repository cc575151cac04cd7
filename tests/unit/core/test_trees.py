"""Trees of tensors are mapped, walked in step and listed; what does not change stays the same object."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from nnsight_engine.core.trees import TreeDepthError, TreeMismatchError, map_pairs, map_tensors, tensors


class Pair(NamedTuple):
    left: Tensor
    right: object


class TaggedTuple(tuple[Tensor, ...]):
    tag: str


class TaggedList(list[Tensor]):
    tag: str


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor
    count: int


@dataclasses.dataclass
class Derived:
    hidden: Tensor
    doubled: Tensor = dataclasses.field(init=False)
    unset: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.hidden * 2


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def plus_one(tensor: Tensor) -> Tensor:
    return tensor + 1


def same(tensor: Tensor) -> Tensor:
    return tensor


def first_row(full: Tensor, part: Tensor) -> Tensor:
    return torch.cat([part, full[1:]])


TREES = {
    "tensor": ones(2),
    "parameter": torch.nn.Parameter(ones(2)),
    "tuple": (ones(2), None, 3),
    "list": [ones(2), "text"],
    "dict": {"a": ones(2), 1: [ones(2)]},
    "ordered": collections.OrderedDict(b=ones(2), a=ones(2)),
    "default": collections.defaultdict(lambda: ones(1), a=ones(2)),
    "namedtuple": Pair(ones(2), (ones(2), None)),
    "structure": torch.return_types.max((ones(2), ones(2))),
    "size": torch.Size([2, 3]),
    "frozen": Frozen(ones(2), 7),
    "derived": Derived(ones(2)),
    "output": BaseModelOutputWithPast(last_hidden_state=ones(2), hidden_states=(ones(2), ones(2))),
    "encoding": BatchEncoding({"input_ids": ones(2)}),
    "nested": (({"x": [Pair(ones(2), None)]},), ones(2)),
    "empty": (),
    "number": 3,
}


@pytest.mark.parametrize("name", TREES)
def test_what_does_not_change_is_the_same_object(name: str) -> None:
    assert map_tensors(TREES[name], same) is TREES[name]
    assert map_pairs(TREES[name], TREES[name], lambda full, part: full) is TREES[name]


@pytest.mark.parametrize("name", TREES)
def test_every_tensor_is_mapped_and_every_class_kept(name: str) -> None:
    tree = TREES[name]
    before = [tensor.clone() for tensor in tensors(tree)]
    mapped = map_tensors(tree, plus_one)
    if name != "parameter":
        assert type(mapped) is type(tree)
    assert [(new - old).tolist() for new, old in zip(tensors(mapped), before, strict=True)] == [
        [1.0, 1.0] for _ in before
    ]
    assert all(torch.equal(now, then) for now, then in zip(tensors(tree), before, strict=True))


def test_unchanged_branches_are_shared_with_the_original() -> None:
    kept = [ones(3)]
    mapped = map_tensors((kept, ones(2)), lambda t: t if t.shape == (3,) else t + 1)
    assert mapped[0] is kept


def test_a_model_output_keeps_fields_items_and_its_cache() -> None:
    cache = DynamicCache()
    output = BaseModelOutputWithPast(
        last_hidden_state=ones(2), past_key_values=cache, hidden_states=(ones(2), ones(2))
    )
    mapped = map_tensors(output, plus_one)
    assert mapped.past_key_values is cache
    assert mapped.attentions is None
    assert mapped.last_hidden_state is mapped["last_hidden_state"] is mapped[0]
    assert mapped.hidden_states is not None
    assert mapped.hidden_states[1].tolist() == [2.0, 2.0]
    assert list(mapped) == list(output)


def test_a_model_output_whose_first_field_is_a_dict_is_not_taken_apart_again() -> None:
    output = BaseModelOutputWithPast(last_hidden_state=ones(2), attentions=(ones(2),))
    output.last_hidden_state = {"a": ones(2)}
    mapped = map_tensors(output, plus_one)
    assert mapped.last_hidden_state["a"].tolist() == [2.0, 2.0]


def test_what_subclasses_carry_besides_their_items_is_kept() -> None:
    tagged = TaggedTuple((ones(2),))
    tagged.tag = "tuple"
    listed = TaggedList([ones(2)])
    listed.tag = "list"
    default = collections.defaultdict(lambda: ones(1), a=ones(2))
    assert map_tensors(tagged, plus_one).tag == "tuple"
    assert map_tensors(listed, plus_one).tag == "list"
    assert map_tensors(default, plus_one)["missing"].tolist() == [1.0]
    assert map_tensors(default, plus_one)["a"].tolist() == [2.0, 2.0]


def test_a_dataclass_is_copied_without_running_its_constructor() -> None:
    mapped = map_tensors(Derived(ones(2)), plus_one)
    assert mapped.hidden.tolist() == [2.0, 2.0]
    assert mapped.doubled.tolist() == [3.0, 3.0]
    assert not hasattr(mapped, "unset")


@dataclasses.dataclass(eq=False)
class FieldsModule(torch.nn.Module):
    weight: Tensor

    def __post_init__(self) -> None:
        super().__init__()


@pytest.mark.parametrize(
    "leaf",
    [
        torch.nn.ParameterList([ones(2)]),
        torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1)}),
        FieldsModule(ones(2)),
        DynamicCache(),
        Frozen,
        range(3),
        {ones(1)},
    ],
)
def test_modules_classes_and_unknown_objects_are_leaves(leaf: object) -> None:
    mapped = map_tensors([leaf, ones(2)], plus_one)
    assert mapped[0] is leaf
    assert list(tensors(leaf)) == []


def test_pairs_write_one_part_into_the_whole() -> None:
    full = (torch.zeros(3), {"a": torch.zeros(2)}, None, "text")
    part = [ones(1), {"a": ones(1)}, None, "text"]
    joined = map_pairs(full, part, first_row)
    assert isinstance(joined, tuple)
    assert joined[0].tolist() == [1.0, 0.0, 0.0]
    assert joined[1]["a"].tolist() == [1.0, 0.0]


def test_pairs_match_mappings_by_key() -> None:
    full = collections.OrderedDict(a=torch.zeros(2), b=torch.zeros(2))
    joined = map_pairs(full, {"b": ones(1) * 2, "a": ones(1)}, first_row)
    assert list(joined) == ["a", "b"]
    assert joined["b"].tolist() == [2.0, 0.0]


OUTPUT = BaseModelOutputWithPast(last_hidden_state=ones(2), hidden_states=(ones(2), ones(2)))


@pytest.mark.parametrize(
    ("full", "part", "path", "reason"),
    [
        (ones(2), (ones(2),), "", "expected a tensor, got a tuple of 1"),
        ((ones(2),), ones(2), "", r"expected a tuple of 1, got a tensor of shape \[2\]"),
        ((ones(2),), (None,), "[0]", "expected a tensor, got None"),
        ((ones(2), [None]), (ones(2), [ones(2)]), "[1][0]", "expected None as it was"),
        ({"a": ones(2)}, {"b": ones(2)}, "", r"expected the keys \['a'\], got \['b'\]"),
        ({"a": ones(2)}, {"a": 3.5}, "['a']", r"got 3\.5"),
        ({"a": ones(2)}, [ones(2)], "", "expected a dict, got a list of 1"),
        ((OUTPUT,), ({**OUTPUT, "hidden_states": (ones(2),)},), "[0].hidden_states", "2 elements, got 1"),
        (Frozen(ones(2), 7), Frozen(ones(2), 8), ".count", "expected 7 as it was"),
        (Frozen(ones(2), 7), Derived(ones(2)), "", "expected a Frozen, got a Derived"),
        ([object()], [object()], "[0]", "expected a object as it was"),
        ([1], [True], "[0]", "expected 1 as it was"),
        (["x" * 99], ["y"], "[0]", "x…"),
    ],
)
def test_a_mismatch_names_the_place(full: object, part: object, path: str, reason: str) -> None:
    with pytest.raises(TreeMismatchError, match=reason) as caught:
        map_pairs(full, part, first_row)
    assert caught.value.path == path
    assert str(caught.value).startswith(path or "the value")


def test_tensors_come_from_left_to_right_as_often_as_they_occur() -> None:
    one, two = ones(1), ones(2)
    found = list(tensors((two, {"a": one, "b": [two]}, None)))
    assert [tensor is expected for tensor, expected in zip(found, [two, one, two], strict=True)] == [True] * 3


def test_a_list_that_contains_itself_is_an_error_and_no_endless_loop() -> None:
    loop: list[object] = [ones(1)]
    loop += [loop, loop]
    for walk in (
        lambda: map_tensors(loop, plus_one),
        lambda: map_pairs(loop, loop, first_row),
        lambda: list(tensors(loop)),
    ):
        with pytest.raises(TreeDepthError, match="may nest 64 deep"):
            walk()


def test_sixty_levels_are_fine() -> None:
    tree: object = ones(1)
    for _ in range(60):
        tree = [tree]
    assert next(tensors(map_tensors(tree, plus_one))).item() == 2.0
