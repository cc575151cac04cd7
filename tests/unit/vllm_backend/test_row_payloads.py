"""What one pipeline stage sends another of a value: a request's rows, and nothing of its neighbours."""

from __future__ import annotations

import enum

import pytest
import torch

from nnsight_engine.serialization import decode, encode
from nnsight_engine.vllm_backend.traces.errors import StageError
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.row_payloads import (
    RemoteStageValue,
    RowPayloads,
    RowsPlaceholder,
    RowStore,
)

HOST = torch.device("cpu")


def spans(*rows: tuple[int, int]) -> list[TraceSpan]:
    return [TraceSpan(str(first), 0, first, num, 0, complete=True) for first, num in rows]


@pytest.mark.parametrize("shape", [(6, 3), (1, 6, 3), (6,)])
def test_only_the_requests_rows_travel_and_come_back(shape: tuple[int, ...]) -> None:
    parcels = RowPayloads(spans((1, 2), (4, 1)), 6)
    whole = torch.arange(6 * 3 if len(shape) > 1 else 6, dtype=torch.float32).reshape(shape)
    axis = shape.index(6)
    packed, forms = parcels.pack((whole, None))
    assert packed[0].shape[axis] == 3
    there, _ = parcels.unpack(packed, forms, HOST)
    own, others = torch.tensor([1, 2, 4]), torch.tensor([0, 3, 5])
    assert torch.equal(there.index_select(axis, own), whole.index_select(axis, own))
    assert not there.index_select(axis, others).any()
    back = parcels.changed((whole, None), parcels.changes((there, None), (there + 1, None)))[0]
    assert torch.equal(back.index_select(axis, own), whole.index_select(axis, own) + 1)
    assert torch.equal(back.index_select(axis, others), whole.index_select(axis, others))


def test_an_unchanged_value_stays_the_same_object() -> None:
    parcels = RowPayloads(spans((0, 2)), 4)
    value = (torch.ones(4, 2), torch.ones(4, 2))
    there = parcels.unpack(*parcels.pack(value), HOST)
    changes = parcels.changes(there, (there[0], there[1] * 2))
    after = parcels.changed(value, changes)
    assert after[0] is value[0]
    assert after[1].tolist() == [[2, 2], [2, 2], [1, 1], [1, 1]]
    assert parcels.changed(value, []) is value


def test_a_tensor_without_rows_travels_whole_even_if_it_is_as_long_as_the_rows() -> None:
    parcels = RowPayloads(spans((2, 1)), 5)
    table = torch.arange(3.0).reshape(1, 3)
    (there,) = parcels.unpack(*parcels.pack((table,)), HOST)
    assert torch.equal(there, table)


def test_objects_stay_where_they_are_and_have_names() -> None:
    keeper, thing = RowStore(), object()
    kept = keeper.keep((1, {"a": [thing]}))
    message = encode(kept, reference=RowsPlaceholder.reference)
    there = decode(message, resolve=lambda name: RemoteStageValue(name, 0))
    assert repr(there[1]["a"][0]) == "<object on pipeline stage 0>"
    with pytest.raises(StageError, match="of type object"):
        there[1]["a"][0].weight.sum()
    again = decode(encode(there, reference=RemoteStageValue.reference), resolve=keeper.resolve)
    assert again[1]["a"][0] is thing
    assert keeper.give_back(kept) == (1, {"a": [thing]})


class Colour(enum.IntEnum):
    RED = 1


def test_what_the_other_side_may_not_know_stays() -> None:
    keeper = RowStore()
    assert keeper.give_back(keeper.keep({Colour.RED: 1})) == {Colour.RED: 1}
    message = encode(keeper.keep([Colour.RED, {Colour.RED: 1}, 2]), reference=RowsPlaceholder.reference)
    there = decode(message, resolve=lambda name: RemoteStageValue(name, 0))
    assert there[2] == 2
    assert [type(one) for one in there[:2]] == [RemoteStageValue] * 2
    assert RowStore.refusal(([1, torch.ones(1)], {"a": there[0]})) is None
    assert RowStore.refusal(({"a": [Colour.RED]},)) == "Colour"


def test_rows_keep_the_order_of_the_requests_when_a_step_has_them_in_another() -> None:
    """A step that is computed again may have the same requests in another order."""
    parcels = RowPayloads(spans((2, 1), (0, 2)), 3)
    whole = torch.tensor([[0.0], [1.0], [2.0]])
    (rows,), forms = parcels.pack((whole,))
    assert rows.flatten().tolist() == [2, 0, 1]
    (there,) = parcels.unpack((rows,), forms, HOST)
    assert torch.equal(there, whole)
    (after,) = parcels.changed((whole,), [(0, rows * 10)])
    assert torch.equal(after, whole * 10)
