"""Saved values reassembled from deltas: all so far, or the changes since the last output."""

from __future__ import annotations

from typing import Any

import pytest

from nnsight_engine.remote_backend.saved_deltas import DeltaReader, OutputReader, output_data
from nnsight_engine.serialization import DecodeError, encode


def news(**changes: Any) -> bytes:
    return encode({"whole": {}, "grown": {}, **changes})


def output(told: list[tuple[int, bytes]], *, invoke: int = 0, num_choices: int = 1) -> bytes:
    choice = {"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}
    return output_data(invoke, num_choices, [choice], told, finished=False)


def test_saves_grow_from_output_to_output() -> None:
    reader = OutputReader()
    first = reader.read(output([(0, news(whole={"tokens": [1]}))]))
    second = reader.read(output([(0, news(grown={"tokens": [2]})), (0, news(grown={"tokens": [3]}))]))
    third = reader.read(output([]))
    assert first.saves == {"tokens": [1]}
    assert second.saves == third.saves == {"tokens": [1, 2, 3]}
    assert [vars(one) for one in first.outputs] == [
        {"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}
    ]


def test_blocks_and_choices_are_kept_apart() -> None:
    reader = OutputReader()
    reader.read(output([(0, news(whole={"x": 1}))], invoke=0))
    both = reader.read(
        output([(0, news(whole={"x": 2})), (1, news(whole={"x": 3}))], invoke=1, num_choices=2)
    )
    assert both.saves == {"x": [2, 3]}


def test_news_that_a_hostile_block_broke_change_nothing() -> None:
    reader = OutputReader()
    read = reader.read(output([(0, b"garbage"), (0, encode([1])), (0, news(whole={"x": 1}))]))
    assert read.saves == {"x": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"whole": [("x", 1)]}, {"whole": 3}, {"whole": {1: 2}}, {"grown": []}, {"grown": {"y": 3}},
        {"grown": {"y": "ab"}}, {"grown": {"z": [1]}}, {"whole": {"y": 0}, "grown": {"y": [1]}},
    ],
)  # fmt: skip
def test_a_malformed_delta_raises_and_changes_nothing(changes: dict[str, Any]) -> None:
    reader = DeltaReader()
    reader.read(news(whole={"y": [1], "z": 5}))
    with pytest.raises(DecodeError):
        reader.read(news(**{"whole": {"x": 1}, **changes}))
    assert reader.take_changes() == ({"y": [1], "z": 5}, {})


def test_changes_are_taken_once_and_items_never_follow_dropped_ones() -> None:
    reader = DeltaReader()
    reader.read(news(whole={"rows": [1], "other": [1]}))
    reader.read(news(grown={"rows": [2]}))
    assert reader.take_changes() == ({"rows": [1, 2], "other": [1]}, {})
    reader.read(news(grown={"rows": [3], "unknown": [1]}))
    reader.read(news(grown={"rows": [4]}))
    reader.forget("other")
    reader.read(news(grown={"other": [2]}))
    assert reader.take_changes() == ({}, {"rows": [3, 4]})
    reader.read(news(grown={"rows": [5]}))
    reader.read(news(whole={"rows": [1, 2]}))
    assert reader.take_changes() == ({"rows": [1, 2]}, {})
    reader.skip()
    reader.read(news(grown={"rows": [3]}))
    assert reader.take_changes() == ({}, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        encode(3),
        encode({"invoke": 0, "news": [1]}),
        output_data(0, 1, [3], [], finished=False),  # type: ignore[list-item] # no choice, as a server may send
    ],
)
def test_what_is_no_output_is_an_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        OutputReader().read(data)
