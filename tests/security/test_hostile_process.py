"""The worker's side of a sandbox whose process says what no honest one says: it is ended, and nobody else is.

The worker's part is real; at the other end of the socket is a thread that lies.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest
import torch

from nnsight_engine.remote_backend.prints import MAX_BYTES
from nnsight_engine.sandbox.channel import EngineSide, Memory, SandboxSide
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.vllm_backend.traces.board import Board
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.sandboxed.cell import Cell, Opened
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    Begin,
    Call,
    Collected,
    Go,
    Offer,
    Slot,
    Told,
    packed,
    read_by_sandbox,
    slot_of,
)

_HALF = 2**22
_LAYER = "model.layers.0.output"
_POSITIONS = "model.layers.0.input"
_SAMPLES = "model.samples.output"
_TOKENS = 100
_ROWS = 5
_OWN = 3
_BUDGET_S = 0.3
_TRACE_S = 4 * _BUDGET_S
_LATEST_S = 3.0
"""Far more than a step may wait, and far less than the attackers want."""

Said = list[bytes | memoryview]
Lie = Callable[[SandboxSide], None]


class _Process:
    """What the worker knows of a process."""

    process = 1

    def __init__(self, side: EngineSide) -> None:
        self.side = side
        self.is_ended = False

    def cpu_s(self) -> float:
        return 0.0

    def end(self) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.side.close()


@dataclass
class _Served:
    """Calls modules, slowly."""

    num_calls: int = 0
    lasts_s: float = 0.0

    def call(self, path: str, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        del path, args, kwargs
        self.num_calls += 1
        time.sleep(self.lasts_s)
        return torch.zeros(2)


@dataclass
class World:
    """A worker with one sandboxed request, three rows of the step's five."""

    ends: list[socket.socket] = field(default_factory=list)
    served: _Served = field(default_factory=_Served)
    board: Board = field(default_factory=Board)
    cell: Cell = field(init=False)
    process: _Process = field(init=False)

    def begin(self, lie: Lie) -> None:
        own, theirs = socket.socketpair()
        self.ends.append(own)
        shared = Memory.create(_HALF)
        self.process = _Process(EngineSide(own, Memory(shared, _HALF)))
        descriptor = theirs.detach()  # the thread's, which closes it
        inside = SandboxSide(descriptor, Memory(shared, _HALF))
        os.close(shared)
        self.board.place.tokens = {_SAMPLES: _TOKENS}
        opened = Opened(
            cast("Any", None), cast("Any", self.served), frozenset({_LAYER, _POSITIONS, _SAMPLES}), _HALF
        )
        self.cell = Cell(self.board, cast("Any", self.process), opened, 1, "acme", _BUDGET_S, _TRACE_S)
        threading.Thread(target=_told, args=(lie, inside, descriptor), daemon=True).start()

    def step(self) -> None:
        self.cell.begin([("own", TraceEntry("key", 0, 1, b"", [{}]))])
        self.board.begin()
        self.cell.step([TraceSpan("own", 0, 0, _OWN, 0, complete=True)], _ROWS)

    def error(self) -> str:
        assert self.process.is_ended
        assert isinstance(self.cell.error, SandboxEndedError)
        assert self.cell.end() == (["own"], {})
        return str(self.cell.error)


def _told(lie: Lie, inside: SandboxSide, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # it has been ended, as it should
        lie(inside)
    os.close(descriptor)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for end in made.ends:
        end.close()


def wanting(*places: str, then: Callable[[Any], Said]) -> Lie:
    """Answer honestly until a value is offered."""

    def lie(side: SandboxSide) -> None:
        while True:
            head, _ = read_by_sandbox(side.receive())
            if isinstance(head, Begin):
                side.send(packed(Go(list(places), live=["own"])))
            elif isinstance(head, Offer):
                side.send(then(head))
            else:
                side.send(packed(Go()))

    return lie


def changing(slots: list[Slot], *bodies: bytes | memoryview) -> Callable[[Any], Said]:
    return lambda _head: packed(Go(changes=slots), bodies)


_ROWS_OF_FLOATS = slot_of(torch.ones(_OWN, 4))


@pytest.mark.parametrize(
    "then",
    [
        changing([Slot("float32", [0, 2**62, 2**62])]),
        changing([Slot("float32", [0, 2**63])]),
        changing([Slot("float32", [_OWN, 4])]),
        changing([Slot("float32", [_ROWS, 4])], bytes(_ROWS * 16)),
        changing([Slot("float32", [-1, -4])], bytes(16)),
        changing([Slot("complex64", [_OWN, 4])], bytes(_OWN * 32)),
        changing([Slot("float32", [_OWN, 4], 7)], _ROWS_OF_FLOATS[1]),
        changing([_ROWS_OF_FLOATS[0]] * 2, _ROWS_OF_FLOATS[1], _ROWS_OF_FLOATS[1]),
        lambda _head: packed(Go(), [bytes(1000)]),
        lambda _head: packed(Go(["made.up"] * 60_000)),
        lambda _head: packed(Collected("printed", "failed")),
        lambda _head: [b"\xff\xff\xff\xff", b"no head"],
        lambda _head: [b"\0"],
        lambda _head: packed(Go(ended=cast("Any", [1, 2]))),
        lambda _head: packed(cast("Any", Told("own", 0, None, ""))),
    ],
    ids=[
        "overflow", "huge", "no bytes", "neighbours", "negative", "dtype", "number", "twice", "unasked bytes",
        "wants", "wrong answer", "long head", "nothing", "types", "unknown",
    ],
)  # fmt: skip
def test_what_it_says_of_a_value_ends_it_alone(world: World, then: Callable[[Any], Said]) -> None:
    world.begin(wanting(_LAYER, then=then))
    world.step()
    value = torch.arange(4.0 * _ROWS).view(_ROWS, 4)
    after = world.board.provide(_LAYER, value)
    assert torch.equal(after, torch.arange(4.0 * _ROWS).view(_ROWS, 4))
    assert world.error()
    assert world.board.wanted == {}


def test_it_changes_its_own_rows(world: World) -> None:
    world.begin(wanting(_LAYER, then=changing([_ROWS_OF_FLOATS[0]], _ROWS_OF_FLOATS[1])))
    world.step()
    after = world.board.provide(_LAYER, torch.zeros(_ROWS, 4))
    assert after.sum(1).tolist() == [4.0, 4.0, 4.0, 0.0, 0.0]
    assert world.cell.error is None


@pytest.mark.parametrize("number", [2**40, -1, 3])
def test_positions_are_not_changed(world: World, number: int) -> None:
    slot, content = slot_of(torch.full((_OWN,), number))
    world.begin(wanting(_POSITIONS, then=changing([slot], content)))
    world.step()
    after = world.board.provide(_POSITIONS, torch.arange(_ROWS))
    assert after.tolist() == [0, 1, 2, 3, 4]
    assert "integers" in world.error()


@pytest.mark.parametrize("number", [_TOKENS, 10**9, -1])
def test_tokens_that_there_are_not_are_not_sampled(world: World, number: int) -> None:
    slot, content = slot_of(torch.full((_OWN,), number))
    world.begin(wanting(_SAMPLES, then=changing([slot], content)))
    world.step()
    assert world.board.provide(_SAMPLES, torch.arange(_ROWS)).tolist() == [0, 1, 2, 3, 4]
    assert f"tokens are from 0 to {_TOKENS - 1}" in world.error()


def test_tokens_that_there_are_can_be_sampled(world: World) -> None:
    slot, content = slot_of(torch.full((_OWN,), _TOKENS - 1))
    world.begin(wanting(_SAMPLES, then=changing([slot], content)))
    world.step()
    assert world.board.provide(_SAMPLES, torch.arange(_ROWS)).tolist() == [99, 99, 99, 3, 4]


def _calls_without_end(side: SandboxSide) -> None:
    side.receive()
    side.send(packed(Go([_LAYER], live=["own"])))
    side.receive()
    one = b"".join(packed(Call("model.layers.0", [], {})))
    while True:  # without waiting for what it is given
        side.send([one])


def _drips(side: SandboxSide) -> None:
    side.receive()
    data = struct.pack("<QQ", 60_000, 0) + bytes(60_000)
    for at in range(len(data)):
        os.write(side._descriptor, data[at : at + 1])
        time.sleep(0.0004)


@pytest.mark.parametrize("lie", [_calls_without_end, _drips])
def test_the_step_waits_no_longer_than_it_may(world: World, lie: Lie) -> None:
    world.served.lasts_s = 0.02
    world.begin(lie)
    started = time.monotonic()
    world.step()
    assert time.monotonic() - started < _LATEST_S
    assert "longer than" in world.error()


def test_requests_that_arrive_together_share_one_step(world: World) -> None:
    def slow(side: SandboxSide) -> None:
        while True:
            side.receive()
            time.sleep(0.75 * _BUDGET_S)
            side.send(packed(Go([], live=[f"own{number}" for number in range(20)])))

    world.begin(slow)
    started = time.monotonic()
    for number in range(20):
        world.cell.begin([(f"own{number}", TraceEntry("key", number, 1, b"", [{}] * 20))])
    world.cell.step([TraceSpan("own0", 0, 0, _OWN, 0, complete=True)], _ROWS)
    assert time.monotonic() - started < _LATEST_S
    ended, _ = world.cell.end()
    assert sorted(ended) == sorted(f"own{number}" for number in range(20))


def test_a_trace_is_waited_for_no_longer_than_one_may(world: World) -> None:
    def slow(side: SandboxSide) -> None:
        while True:
            side.receive()
            time.sleep(0.5 * _BUDGET_S)
            side.send(packed(Go([], live=["own"])))

    world.begin(slow)
    world.step()
    for _ in range(20):
        world.cell.end()
        world.cell.refill()
        world.cell.step([TraceSpan("own", 0, 0, _OWN, 0, complete=True)], _ROWS)
    assert "as long as it does for one trace" in str(world.cell.error)


def test_it_speaks_for_its_own_requests_only(world: World) -> None:
    def lie(side: SandboxSide) -> None:
        while True:
            head, _ = read_by_sandbox(side.receive())
            told = [Told("other", 0, b"data", "printed"), Told("own", 0, b"data", "printed")]
            go = Go([_LAYER, "made.up", "result"], ended=["other"], told=told)
            side.send(
                packed(msgspec.structs.replace(go, live=["own", "other"]) if type(head) is Begin else go)
            )

    world.begin(lie)
    world.step()
    assert world.cell.live == {"own"}
    assert list(world.board.wanted) == [_LAYER]
    assert world.cell.end() == ([], {"own": ("key", 0, b"data", "printed")})


def test_what_it_says_last_is_no_longer_than_an_honest_one_s(world: World) -> None:
    def lie(side: SandboxSide) -> None:
        side.receive()
        side.send(packed(Go([], live=["own"])))
        side.receive()
        side.send(packed(Collected("p" * (MAX_BYTES + 1), "f" * 10_000), [b"saved"]))

    world.begin(lie)
    world.cell.begin([("own", TraceEntry("key", 0, 1, b"", [{}]))])
    (content,), (printed, failure) = world.cell.collect("key", {}, None)
    assert bytes(cast("memoryview", content)) == b"saved"
    assert (len(printed), len(failure)) == (MAX_BYTES, 2000)


def test_memory_is_given_back() -> None:
    shared = Memory.create(_HALF)
    ours, theirs = Memory(shared, _HALF), Memory(shared, _HALF)
    for number in range(2):
        theirs.half(number)[:] = b"\1" * _HALF
    before = os.fstat(shared).st_blocks
    ours.forget()
    assert (before * 512, os.fstat(shared).st_blocks) == (2 * _HALF, 0)
    assert bytes(theirs.half(1)) == bytes(_HALF)
    os.close(shared)
