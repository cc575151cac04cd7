"""Orders of the leading tensor-parallel rank: the other ranks receive the same tensors and arguments."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError
from nnsight_engine.vllm_backend.traces.messages import CallOrder
from nnsight_engine.vllm_backend.traces.ranks import ContinueOrder, slot_of_rank
from tests.fakes.ranks import two_ranks

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]
TENSORS: dict[str, torch.Tensor] = {
    "bfloat16": torch.arange(12.0).reshape(3, 4).bfloat16(),
    "a view": torch.arange(24.0).reshape(4, 6)[:, ::2].T,
    "complex": torch.complex(torch.ones(3), torch.arange(3.0)),
    "float8": torch.arange(4.0).to(torch.float8_e4m3fn),
    "large integers": torch.tensor([2**63 - 1]),
    "empty": torch.zeros(0, 4),
    "one number": torch.tensor(3.0),
}


@pytest.mark.parametrize("device", DEVICES)
def test_changed_tensors_arrive_with_their_numbers(device: str) -> None:
    leading, following, orders = two_ranks(device)
    tensors = [tensor.to(device) for tensor in TENSORS.values()] + [torch.arange(5)]  # one on the host
    slots = [slot_of_rank(tensor, 2 * number) for number, tensor in enumerate(tensors)]
    leading.broadcast(ContinueOrder(["here"], slots, is_true=True, undone=["a"]), tensors)
    order, content = following.next_order()
    assert isinstance(order, ContinueOrder)
    assert (order.wanted, order.is_true, order.undone) == (["here"], True, ["a"])
    for number, (slot, sent) in enumerate(zip(order.changes, tensors, strict=True)):
        found = content.next(slot)
        assert slot.number == 2 * number
        assert (found.dtype, found.device) == (sent.dtype, sent.device)
        assert torch.equal(found, sent)
    assert orders.empty()


@pytest.mark.parametrize("device", DEVICES)
def test_arguments_of_a_call_arrive_as_they_were(device: str) -> None:
    leading, following, orders = two_ranks(device)
    first, second = torch.randn(2, 3).to(device), torch.arange(3)
    plain = (None, 1, True, 0.5, 2j, "a", b"b")
    args: tuple[Any, ...] = (first, [second, plain], {"key": first, 3: torch.int8})
    leading.broadcast_call("model.head", "forward", args, {"again": [first]}, 7)
    order, content = following.next_order()
    assert isinstance(order, CallOrder)
    assert (order.path, order.method, order.adapter) == ("model.head", "forward", 7)
    found, named = content.arguments(order)
    assert found[1][1] == plain
    assert found[2][3] is torch.int8
    received = [found[0], found[1][0], found[2]["key"], named["again"][0]]
    for one, sent in zip(received, [first, second, first, first], strict=True):
        assert one.device == sent.device
        assert torch.equal(one, sent)
    assert orders.empty()


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        (threading, "a module"),
        ([{"a": object()}], "a object"),
        (torch.zeros(2, device="meta"), "a tensor on meta"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_an_argument_that_cannot_be_sent_is_refused_before_any_rank_waits(argument: Any, name: str) -> None:
    leading, _, orders = two_ranks()
    with pytest.raises(SpreadModuleError, match=name):
        leading.broadcast_call("model.head", "", (argument,), {}, None)
    assert orders.empty()
