"""What a request's code may answer with: JSON's types and tensors; anything else is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.vllm_backend.json_values import NotPlainError, SaveBudget, plain_saves


def _never(*_: Any) -> Any:
    raise AssertionError("no code of a value's own is to run")


class Mine:
    __iter__ = __len__ = __float__ = __int__ = __str__ = __eq__ = __array__ = _never
    __hash__ = None  # type: ignore[assignment] # nor is it asked for one


class Meta(type):
    __hash__ = __eq__ = __instancecheck__ = __subclasscheck__ = _never
    __name__ = property(_never)


class OfMeta(metaclass=Meta):
    pass


class Array(np.ndarray):
    dtype = ndim = shape = property(_never)
    item = tolist = _never


class AsNumpys(Array):
    __module__ = "numpy"


class Number(np.float64):
    dtype = property(_never)
    item = _never
    __module__ = "numpy"


class Title:
    __repr__ = __str__ = _never


def plain(value: Any) -> Any:
    return plain_saves({"v": value}, lambda tensor: ("tensor", *tensor.shape), SaveBudget(2**30))["v"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (2**80, 2**80),
        (float("nan"), None),
        (float("-inf"), None),
        ("é\ud800", "é\\ud800"),
        ((1, [2.5, {"a": frozenset({3})}]), [1, [2.5, {"a": [3]}]]),
        ({1: 2, "b": None}, {"1": 2, "b": None}),
        (torch.ones(2, 3), ("tensor", 2, 3)),
        ([torch.nn.Parameter(torch.ones(1))], [("tensor", 1)]),
        (np.zeros((2, 2)), ("tensor", 2, 2)),
        (np.float32(1.5), 1.5),
        (torch.float32, "torch.float32"),
        (torch.Size([1, 2]), [1, 2]),
    ],
)
def test_what_has_a_place(value: Any, expected: Any) -> None:
    assert plain(value) == expected


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (Mine(), "type Mine"),
        ([{"a": Mine()}], "type Mine"),
        (Mine, "type type"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        ({(1, 2): 3}, "key of type tuple"),
        ({1: 2, "1": 3}, "one in JSON"),
        (CYCLE, "32 lists and dicts deep"),
        ([0] * 100_001, "100,000 values"),
        (1 << 5000, "type int"),
        (np.array(["a"]), "array of"),
        (np.array([None]), "array of objects"),
        (np.array([1j]), "array of complex numbers"),
        (np.zeros(1, [((Title(), "a"), "f4")]), "array of records"),
        (np.zeros(2).view(Array), "type Array"),
        (np.zeros(()).view(AsNumpys), "type AsNumpys"),
        (Number(1), "type Number"),
        (np.complex64(1), "type complex64"),
        (OfMeta(), "type OfMeta"),
        ({"a": [OfMeta()]}, "type OfMeta"),
    ],
)
def test_what_has_none_is_named(value: Any, match: str) -> None:
    with pytest.raises(NotPlainError, match=rf"`v` was saved.*{match}"):
        plain(value)


def test_a_tensor_that_does_not_fit_is_named_too() -> None:
    def refuse(_: torch.Tensor) -> None:
        raise ValueError("it is odd")

    with pytest.raises(NotPlainError, match=r"`v` was saved.*it is odd"):
        plain_saves({"a": 1, "v": torch.ones(1)}, refuse, SaveBudget(2**20))


@pytest.mark.parametrize(
    "saves",
    [
        {"v": [torch.ones(100)] * 3},
        {"v": torch.ones(1).expand(10**9)},
        {"v": [torch.ones(40, dtype=torch.bool)] * 4},
        {"v": ["a" * 500] * 3},
        {"v": {"a" * 2000: 1}},
        {"a": torch.ones(200), "v": torch.ones(200)},
    ],
    ids=["shared", "expanded", "bools", "texts", "keys", "variables"],
)
def test_what_is_saved_several_times_counts_each_time(saves: dict[str, Any]) -> None:
    made: list[torch.Tensor] = []
    with pytest.raises(NotPlainError, match=r"`v` was saved.*more than 1,000 bytes"):
        plain_saves(saves, made.append, SaveBudget(1000))
    assert sum(one.nbytes for one in made) <= 1000


def test_all_variables_together_have_a_number_of_values() -> None:
    many = [1] * 99_000
    with pytest.raises(NotPlainError, match="all variables together hold more than 1,000,000 values"):
        plain_saves({f"v{index}": many for index in range(20)}, lambda one: one, SaveBudget(2**30))
