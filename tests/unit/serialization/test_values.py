"""A value arrives as it was sent: type, identity and all, or is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import logging
import math
import pathlib
import socket
import threading
import types
import typing
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from nnsight_engine.serialization import TRUSTED, DecodeError, EncodeError, MessageLimits, decode, encode


def sent(value: Any, **options: Any) -> Any:
    return decode(encode(value), policy=TRUSTED, **options)


class Shade(enum.Flag):
    LIGHT = 1
    DARK = 2


class Point(typing.NamedTuple):
    x: int
    y: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Key:
    name: str


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Rows(list[int]):
    title = "rows"


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
)
KEYS = st.recursive(ATOMS, lambda keys: st.tuples(keys, keys) | st.frozensets(keys, max_size=3), max_leaves=4)
VALUES = st.recursive(
    ATOMS | st.sets(KEYS, max_size=3),
    lambda values: (
        st.lists(values, max_size=4)
        | st.tuples(values, values)
        | st.dictionaries(KEYS, values, max_size=4)
        | st.builds(slice, values, values)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_plain_values_arrive_equal_without_any_trust(value: Any) -> None:
    arrived = decode(encode(value))
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**63) - 1,
        -(2**200),
        math.inf,
        -0.0,
        "\ud800 alone",
        bytearray(b"ab"),
        range(3, 9, 2),
        ...,
        NotImplemented,
        torch.float8_e5m2,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
        pathlib.PurePosixPath("/a/b"),
        decimal.Decimal("1.50"),
        types.SimpleNamespace(a=[1]),
        np.float32(1.5),
    ],
)
def test_values_of_results_keep_type_and_content(value: Any) -> None:
    arrived = decode(encode(value))
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        len,
        math,
        torch.relu,
        torch.nn.functional.gelu,
        torch.nn.functional.softmax,
        torch.Tensor.sum,
        torch.ops.aten.add.Tensor,
        torch.contiguous_format,
        np.add,
        functools.reduce,
        logging.getLogger("some.name"),
        collections.OrderedDict,
        type(None),
        typing.Any,
    ],
)
def test_what_is_installed_on_both_sides_is_found_by_name(value: Any) -> None:
    assert sent(value) is value


def test_nan_and_order_of_keys_survive() -> None:
    assert math.isnan(sent(math.nan))
    assert list(sent({"b": 1, 3: 2, "a": 3})) == ["b", 3, "a"]


def test_the_same_object_stays_the_same_and_cycles_close() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    around: tuple[list[Any], dict[str, Any]] = ([], {})
    around[0].append(around)
    around[1]["me"] = around
    first, second, ring, holder = sent([shared, shared, around, Holder(shared)])
    assert first is second is first[1] is holder.held
    assert ring[0][0] is ring
    assert ring[1]["me"] is ring


def test_an_object_may_hold_its_own_method_and_be_a_key_of_its_own_dict() -> None:
    holder = Holder({})
    holder.held[Key("k")] = {holder.__init__, holder.__class__}  # type: ignore[misc]
    holder.held[holder] = 1
    arrived = sent(holder)
    assert arrived in arrived.held
    assert {
        getattr(one, "__self__", arrived) for one in arrived.held[type(next(iter(arrived.held)))("k")]
    } == {arrived}


@pytest.mark.parametrize("container", [list, tuple])
def test_depth_costs_nothing(container: Any) -> None:
    value: Any = ()
    for _ in range(100_000):
        value = container([value])
    arrived, depth = decode(encode(value)), 0
    while arrived:
        arrived, depth = arrived[0], depth + 1
    assert depth == 100_000


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.complex128,
        torch.int64, torch.uint16,
    ],
)  # fmt: skip
def test_tensors_of_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    arrived = decode(encode(tensor))
    assert (arrived.dtype, arrived.shape) == (dtype, shape)
    assert torch.equal(arrived.to(torch.complex128), tensor.to(torch.complex128))


def test_views_arrive_contiguous_and_what_is_one_tensor_stays_one() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    column, again, whole, conjugate = sent([base[:, 1], base[:, 1], base, torch.tensor([1 + 2j]).conj()])
    assert column.tolist() == again.tolist() == [1, 5, 9]
    assert column.is_contiguous()
    assert torch.equal(whole, base)
    assert conjugate.tolist() == [1 - 2j]
    one, other = sent([base, base])
    assert one is other


def test_parameters_gradients_and_meta_tensors_are_kept() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    free, wanted, meta = sent(
        [parameter, torch.ones(1, requires_grad=True), torch.empty(5, 6, device="meta")]
    )
    assert isinstance(free, torch.nn.Parameter)
    assert free.grad is not None
    assert free.grad.tolist() == [3, 3]
    assert wanted.requires_grad
    assert (meta.device.type, meta.shape) == ("meta", (5, 6))
    assert decode(encode(torch.ones(2)), device="meta").is_meta


def test_arrays_keep_type_and_byte_order_and_objects_are_refused() -> None:
    for array in (
        np.arange(6).reshape(2, 3).T,
        np.array(["ab", "c"]),
        np.array([1], ">i4"),
        np.zeros((0, 2)),
    ):
        arrived = decode(encode(array))
        assert arrived.dtype == array.dtype
        assert np.array_equal(arrived, array)
    with pytest.raises(EncodeError, match=r"item \[0\].*object"):
        encode([np.array([object()])])


def test_a_model_output_keeps_attributes_and_keys_without_trust() -> None:
    output = BaseModelOutput(last_hidden_state=torch.ones(1, 2))
    arrived = decode(encode(output))
    assert isinstance(arrived, BaseModelOutput)
    assert arrived.last_hidden_state is arrived["last_hidden_state"] is arrived[0]


def test_a_module_computes_the_same_and_shares_its_tied_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)).eval()
    model[2].weight = model[0].weight
    arrived = sent(model)
    rows = torch.randn(2, 3)
    assert torch.equal(arrived(rows), model(rows))
    assert arrived[2].weight is arrived[0].weight
    assert not arrived.training


def test_objects_of_custom_classes() -> None:
    values = [Shade.LIGHT | Shade.DARK, Point(1, [2]), Slotted(1, {"a": 2}), Rows([1, 2]), Key("x")]
    arrived = sent([*values, type(values[0]), {Key("x"): 1}])
    assert [repr(value) for value in arrived[:5]] == [repr(value) for value in values]
    assert arrived[0] is arrived[5].LIGHT | arrived[5].DARK
    assert arrived[1].y == [2]
    assert (type(arrived[3]).__name__, arrived[3].title) == ("Rows", "rows")
    assert arrived[6][arrived[4]] == 1


def test_references_are_asked_first_and_resolved_there() -> None:
    special, elsewhere = Holder(open), Holder("theirs")
    data = encode(
        {"a": special, "b": [special]}, reference=lambda value: ("held", "1") if value is special else None
    )
    arrived = decode(data, resolve=lambda name: elsewhere if name == ("held", "1") else None)
    assert arrived["a"] is arrived["b"][0] is elsewhere
    with pytest.raises(DecodeError, match="refers to something"):
        decode(data)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (io.BytesIO(), "send what is in it"),
        (socket.socket(), "open the connection"),
        (threading.Lock(), "make one"),
        (threading.Thread(), "start one"),
        ((one for one in [1]), "send list"),
        (weakref.ref(Key), "what it refers to"),
        (torch.Generator(), "send a seed"),
        (torch.ones(2).to_sparse(), "to_dense"),
        (memoryview(b""), "send bytes"),
    ],
)
def test_what_cannot_travel_is_named_with_its_path_and_what_to_do(value: Any, advice: str) -> None:
    with pytest.raises(EncodeError, match=rf"item \['x'\], item \[1\], attribute `\.held`.*{advice}"):
        encode({"x": [0, Holder(value)]})


def test_hooks_of_a_module_are_refused_by_name() -> None:
    model = torch.nn.Linear(1, 1)

    def my_hook(*_: Any) -> None: ...

    model.register_forward_hook(my_hook)
    with pytest.raises(EncodeError, match="my_hook"):
        encode(model)


def test_compressed_messages_are_smaller_and_mean_the_same() -> None:
    value: dict[str, Any] = {"rows": torch.arange(3).repeat(4000), "text": "again " * 1000}
    plain, small = encode(value), encode(value, compress=True)
    assert len(small) < len(plain) / 10
    assert torch.equal(decode(small)["rows"], value["rows"])
    assert decode(small)["text"] == value["text"]


def test_the_sender_has_limits_too() -> None:
    with pytest.raises(EncodeError, match="10 objects"):
        encode(list(range(20)), limits=MessageLimits(max_nodes=10))
    with pytest.raises(EncodeError, match="bytes"):
        encode(torch.zeros(1).expand(10**9), limits=MessageLimits(max_bytes=10**6))
    with pytest.raises(EncodeError, match="a string"):
        encode("x" * 100, limits=MessageLimits(max_text_bytes=10))
