"""Traces over tensor-parallel ranks: parts of tensors that make a whole, and orders of the leading rank."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from vllm.model_executor import layers

from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError
from nnsight_engine.vllm_backend.traces.messages import CallOrder
from nnsight_engine.vllm_backend.traces.ranks import ContinueOrder, slot_of_rank
from nnsight_engine.vllm_backend.traces.shards import (
    COLLECTIVE,
    EVERYWHERE,
    Layout,
    ShardLocation,
    ShardPiece,
)
from tests.fakes.ranks import two_ranks

# Four heads of 2 columns; two key-value heads that two ranks have each; the same of values, 3 columns wide.
QKV: Final = Layout((ShardPiece(2), ShardPiece(2, copies=2), ShardPiece(3, copies=2)))
DEVICES: Final = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]


def parts_of(layout: Layout, whole: torch.Tensor, size: int) -> torch.Tensor:
    return torch.stack([layout.part(whole, rank, size) for rank in range(size)])


def test_a_fused_projection_is_put_together_matrix_by_matrix() -> None:
    rows = [[rank] * 2 + [10 + rank // 2] * 2 + [20 + rank // 2] * 3 for rank in range(4)]
    parts = torch.tensor(rows, dtype=torch.float32)[:, None].repeat(1, 5, 1)
    whole = QKV.whole(parts)
    assert whole.shape == (5, 8 + 4 + 6)
    assert whole[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 10, 10, 11, 11, 20, 20, 20, 21, 21, 21]
    assert torch.equal(parts_of(QKV, whole, 4), parts)
    for wrong in (torch.zeros(5, 19), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="18 columns"):
            QKV.part(wrong, 0, 4)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_a_whole_make_it_again(size: int, axis: int) -> None:
    layout = Layout((ShardPiece(3), ShardPiece(2), ShardPiece(4, copies=2)), axis=axis)
    shape = [3, 4]
    shape[axis] = layout.width_over(size)
    whole = torch.randn(6, *shape)
    assert torch.equal(layout.whole(parts_of(layout, whole, size)), whole)


def test_a_place_leaves_alone_what_every_rank_has() -> None:
    place = ShardLocation((None, Layout((ShardPiece(2),))))
    positions, queries = torch.arange(3), torch.randn(3, 4)
    cut = place.part(((positions, queries), {"scale": 2}), 1, 2)
    assert cut[0][0] is positions
    assert torch.equal(cut[0][1], queries[:, 2:])
    assert cut[1] == {"scale": 2}
    assert (place.is_spread, EVERYWHERE.is_spread) == (True, False)
    assert place.fits([positions, queries[:, 2:]])
    assert not place.fits([positions, queries])


def test_every_layer_of_vllm_that_waits_for_other_ranks_is_known() -> None:
    """One that a block could call on one rank alone would wait forever."""
    folder = Path(layers.__path__[0])
    calls = [
        f"tensor_model_parallel_{kind}(" for kind in ("all_reduce", "all_gather", "gather", "reduce_scatter")
    ]
    waiting = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if any(call in path.read_text() for call in calls)
    }
    known = {str(Path(inspect.getfile(kind)).relative_to(folder)) for kind in COLLECTIVE}
    parallel = {"linear.py", "vocab_parallel_embedding.py"}
    functions = {"fused_allreduce_gemma_rms_norm.py"}
    assert waiting == known | parallel | functions


@pytest.mark.parametrize("device", DEVICES)
def test_changed_tensors_arrive_with_their_numbers(device: str) -> None:
    leading, following, orders = two_ranks(device)
    tensors = [
        torch.arange(12.0).reshape(3, 4).bfloat16(),
        torch.arange(24.0).reshape(4, 6)[:, ::2].T,
        torch.complex(torch.ones(3), torch.arange(3.0)),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.tensor([2**63 - 1]),
        torch.zeros(0, 4),
        torch.tensor(3.0),
    ]
    tensors = [*(one.to(device) for one in tensors), torch.arange(5)]  # one on the host
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
