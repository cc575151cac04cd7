"""A block runs on the other side as it would have here: its variables, its lines, what it shares."""

# ruff: noqa: F841 - a block's variables are looked at where it runs

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from types import CellType
from typing import Any

import pytest
import torch

from nnsight_engine.core.closure_cells import content
from nnsight_engine.core.saves import SAVES, save
from nnsight_engine.serialization import (
    DATA_ONLY,
    DecodeError,
    EncodeError,
    ReceivedTrace,
    SentBlock,
    decode,
    decode_trace,
    decode_trace_pickled,
    encode,
    encode_trace,
    encode_trace_pickled,
)
from nnsight_engine.tracing.tracer import Tracer
from tests.unit.serialization.recording import Recorder, run

FACTOR = 3
UNSENDABLE = open  # a block that does not mention it does not care


Over = Callable[..., ReceivedTrace]
"""Returns blocks as they arrive on the other side."""


@pytest.fixture(
    params=[(encode_trace, decode_trace), (encode_trace_pickled, decode_trace_pickled)],
    ids=["wire", "pickled"],
)
def over(request: pytest.FixtureRequest) -> Over:
    encoded, decoded = request.param

    def sent(*recorders: Recorder | SentBlock, **options: Any) -> ReceivedTrace:
        data = encoded(
            [one.kept if isinstance(one, Recorder) else one for one in recorders],
            reference=lambda value: ("tracer",) if isinstance(value, Tracer) else None,
            **options,
        )
        arrived: ReceivedTrace = decoded(data, resolve=lambda name: name)
        return arrived

    return sent


def helper(value: int) -> int:
    return value * FACTOR


class Scaled:
    def __init__(self, by: int) -> None:
        self.by = by


def test_a_block_sees_its_variables_and_the_globals_that_it_mentions(over: Over) -> None:
    start, scaled, unsendable = 2, Scaled(5), (one for one in [1])
    with Recorder() as recorder:
        result = helper(start) + FACTOR * scaled.by
    arrived = over(recorder)
    assert run(arrived.blocks[0])["result"] == 21
    assert arrived.blocks[0].globals_ is not globals()
    assert unsendable is not None


def test_a_missing_global_is_reported_when_it_is_reached(over: Over) -> None:
    with Recorder() as recorder:
        if FACTOR < 0:
            missing_name()  # type: ignore[name-defined] # noqa: F821 - so it is
        done = True
        other_missing  # type: ignore[name-defined] # noqa: B018, F821 - so it is
    with pytest.raises(NameError, match="other_missing"):
        run(over(recorder).blocks[0])


def test_blocks_within_a_block_and_loops_are_compiled_from_the_same_text(over: Over) -> None:
    seen: list[Any] = []
    with Recorder() as recorder:
        for step in range(2):
            with Tracer():
                inner = step * FACTOR
                seen.append(inner)
        with contextlib.nullcontext("plain") as plain:
            seen.append(plain)
    variables = run(over(recorder).blocks[0])
    assert variables["seen"] == [0, 3, "plain"]
    assert seen == []


def test_the_second_of_two_contexts_travels_with_the_right_item(over: Over) -> None:
    with contextlib.nullcontext() as outer, Recorder() as recorder, contextlib.nullcontext(5) as five:
        result = (outer, five)
    assert run(over(recorder).blocks[0])["result"] == (None, 5)


def test_code_and_positions_equal_the_senders(over: Over) -> None:
    if FACTOR:
        with Recorder() as recorder:
            text = """over
two lines"""
            [text for _ in range(2)]
    sent, arrived = recorder.kept.info.block, over(recorder).blocks[0].block
    assert list(arrived.code.co_positions()) == list(sent.code.co_positions())
    assert arrived.code.co_code == sent.code.co_code
    assert (arrived.line, arrived.text, arrived.code.co_filename) == (sent.line, sent.text, __file__)


def test_an_error_points_at_the_users_line(over: Over) -> None:
    with Recorder() as recorder:
        value = 1
        value / 0  # the line
    with pytest.raises(ZeroDivisionError) as caught:
        run(over(recorder).blocks[0])
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, "value / 0  # the line")
    assert last.name == test_an_error_points_at_the_users_line.__name__


def test_blocks_share_objects_but_not_variables(over: Over) -> None:
    kept: list[int] = []
    count = 0
    with Recorder() as first:
        count += 1
        kept.append(count)
    with Recorder() as second:
        count += 10
        kept.append(count)
    arrived = over(first, second, shared={"kept": kept})
    one, two = run(arrived.blocks[0]), run(arrived.blocks[1])
    assert one["kept"] is two["kept"] is arrived.shared["kept"]
    assert arrived.shared["kept"] == [1, 10]


def test_a_cell_that_two_blocks_are_given_stays_one(over: Over) -> None:
    with Recorder() as first:
        made = 1
    with Recorder() as second:
        found = made
    cell = CellType()
    blocks = [SentBlock(one.kept.info, {"made": cell}) for one in (first, second)]
    arrived = over(*blocks)
    run(arrived.blocks[0])
    assert run(arrived.blocks[1])["found"] == 1


def test_what_was_saved_before_is_still_known_as_saved(over: Over) -> None:
    SAVES.enter()
    try:
        kept, other = save([1]), 2
        with Recorder() as recorder:
            kept.append(other)
        arrived = over(recorder, saved=SAVES.marked.keys())
    finally:
        SAVES.exit()
    assert arrived.saved == [[1]]
    assert arrived.saved[0] is content(arrived.blocks[0].variables["kept"])


def test_the_tracer_itself_goes_by_reference(over: Over) -> None:
    with Recorder() as recorder:
        seen = recorder
    assert run(over(recorder).blocks[0])["seen"] == ("tracer",)


class Model:
    """A class with a block in a method."""

    __secret = 4

    def describe(self) -> int:
        return 1

    @classmethod
    @contextlib.contextmanager
    def context(cls) -> Iterator[None]:
        yield


class Special(Model):
    __secret = 5

    def describe(self) -> int:
        return 2

    def traced(self) -> Recorder:
        with Recorder() as recorder:
            result = (super().describe(), self.__secret, torch.ones(1).item())
        kept: Recorder = recorder
        return kept


def test_a_block_in_a_method_keeps_super_and_private_names(over: Over) -> None:
    assert run(over(Special().traced()).blocks[0])["result"] == (1, 5, 1.0)
    assert Special.traced.__globals__ is Model.describe.__globals__ is globals()


def test_what_a_block_cannot_take_along_is_named(over: Over) -> None:
    stream = (one for one in [1])
    with Recorder() as recorder:
        list(stream)
    with pytest.raises(EncodeError, match=r"block 0, variable `stream` cannot be sent.*generator"):
        over(recorder)


def test_a_trace_is_refused_as_data_and_a_value_as_a_trace() -> None:
    with Recorder() as recorder:
        pass
    data = encode_trace([recorder.kept])
    with pytest.raises(DecodeError, match="holds code"):
        decode(data)
    with pytest.raises(DecodeError, match="holds code"):
        decode_trace(data, policy=DATA_ONLY)
    with pytest.raises(DecodeError, match="not a trace"):
        decode_trace(encode([1, 2]))
