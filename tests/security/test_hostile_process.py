"""The worker's side of a sandbox whose process says what no honest one says: it is ended, and nobody else is.

The worker's part is real; at the other end of the socket is a thread that lies.
"""

from __future__ import annotations

import contextlib
import itertools
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
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.sandboxed import sandbox_session as cell_module
from nnsight_engine.vllm_backend.traces.sandboxed import wait_budget as waiting_module
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    BeginRequests,
    CallRequest,
    Collected,
    ContinueReply,
    Offer,
    SandboxReply,
    Tensors,
    ValueSlot,
    packed,
    read_by_sandbox,
    slot_of,
)
from nnsight_engine.vllm_backend.traces.sandboxed.module_call import ModuleCall
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_session import Opened, SandboxSession
from nnsight_engine.vllm_backend.traces.sandboxed.wait_budget import WaitBudget
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

_HALF = 2**22
_LAYER = "model.layers.0.output"
_LATER = "model.layers.1.output"
_POSITIONS = "model.layers.0.input"
_SAMPLES = "model.samples.output"
_TOKENS = 100
_CALL_ROWS = 8
_ROWS = 5
_OWN = 3
_BUDGET_S = 0.3
_TRACE_S = 4 * _BUDGET_S
_LATEST_S = 12.0
"""Far more than a step may wait, and far less than the attackers want."""
_SHORT_S = 0.01
"""How long a step waits where it is to go on without a process."""

Said = list[bytes | memoryview]
Lie = Callable[[SandboxSide], None]


class _Process:
    """What the worker knows of a process."""

    process = 1

    def __init__(self, side: EngineSide, *, never_rests: bool) -> None:
        self.side = side
        self.is_ended = False
        self.used_s = 0.0
        self.never_rests = never_rests

    def cpu_s(self) -> float:
        # What a lie has it use, however busy the machine is.
        return time.monotonic() if self.never_rests else self.used_s

    def end(self) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.side.close()


@dataclass
class _Served:
    """Calls modules, slowly."""

    num_calls: int = 0
    lasts_s: float = 0.0
    call_bytes: int = 1000

    def begin(self, path: str, args: Sequence[Any], kwargs: dict[str, Any]) -> ModuleCall:
        del args, kwargs
        return ModuleCall(path, self._called, [torch.zeros(_CALL_ROWS, 2)], 1, 1)

    def _called(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        time.sleep(self.lasts_s)
        return rows + self.num_calls


@dataclass
class World:
    """A worker with one sandboxed request, three rows of the step's five."""

    ends: list[socket.socket] = field(default_factory=list)
    served: _Served = field(default_factory=_Served)
    dispatcher: TraceDispatcher = field(default_factory=TraceDispatcher)
    cell: SandboxSession = field(init=False)
    process: _Process = field(init=False)
    waiting: WaitBudget = field(default_factory=lambda: WaitBudget(_BUDGET_S, 5 * _BUDGET_S))

    def begin(self, lie: Lie, *, never_rests: bool = False) -> None:
        own, theirs = socket.socketpair()
        self.ends.append(own)
        shared = Memory.create(_HALF)
        self.process = _Process(EngineSide(own, Memory(shared, _HALF)), never_rests=never_rests)
        descriptor = theirs.detach()  # the thread's, which closes it
        inside = SandboxSide(descriptor, Memory(shared, _HALF))
        os.close(shared)
        self.dispatcher.place.tokens = {_SAMPLES: _TOKENS}
        opened = Opened(
            cast("Any", None),
            cast("Any", self.served),
            frozenset({_LAYER, _LATER, _POSITIONS, _SAMPLES}),
            _HALF,
        )
        self.cell = SandboxSession(
            self.dispatcher, cast("Any", self.process), opened, 1, "acme", _BUDGET_S, _TRACE_S
        )
        threading.Thread(target=_told, args=(lie, inside, descriptor), daemon=True).start()

    def step(self) -> None:
        self.cell.begin([("own", TraceEntry("key", 0, 1, b"", [{}], streams=True, prints=True))])
        self.go([TraceSpan("own", 0, 0, _OWN, 0, complete=True)])

    def go(
        self, spans: Sequence[TraceSpan], *, is_bound: bool = True, is_single_tenant: bool = False
    ) -> None:
        """Begin a step as the worker does."""
        self.dispatcher.begin()
        self.waiting.begin(is_single_tenant=is_single_tenant)
        self.cell.prepare(spans, is_bound=is_bound)
        self.waiting.wait([self.cell])
        self.cell.step(spans, _ROWS)
        self.gather()
        self.dispatcher.gather = self.gather

    def gather(self) -> None:
        self.waiting.wait([self.cell])
        self.cell.defer()

    def listen(self) -> None:
        """Wait between steps until the process has answered."""
        while self.cell.connection.is_pending:
            self.waiting.wait_for_any([self.cell], 10)

    def end(self) -> tuple[list[str], dict[str, Any]]:
        self.cell.finish()
        self.waiting.wait([self.cell])
        self.cell.end()
        return self.cell.take_deltas()

    def error(self) -> str:
        assert self.process.is_ended
        assert isinstance(self.cell.error, SandboxEndedError)
        assert self.end() == (["own"], {})
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
            if isinstance(head, BeginRequests):
                side.send(packed(ContinueReply(list(places), live=["own"])))
            elif isinstance(head, Offer):
                side.send(then(head))
            else:
                side.send(packed(ContinueReply()))

    return lie


def changing(slots: list[ValueSlot], *bodies: bytes | memoryview) -> Callable[[Any], Said]:
    return lambda _head: packed(ContinueReply(changes=slots), bodies)


_ROWS_OF_FLOATS = slot_of(torch.ones(_OWN, 4))


@pytest.mark.parametrize(
    "then",
    [
        changing([ValueSlot("float32", [0, 2**62, 2**62])]),
        changing([ValueSlot("float32", [0, 2**63])]),
        changing([ValueSlot("float32", [_OWN, 4])]),
        changing([ValueSlot("float32", [_ROWS, 4])], bytes(_ROWS * 16)),
        changing([ValueSlot("float32", [-1, -4])], bytes(16)),
        changing([ValueSlot("complex64", [_OWN, 4])], bytes(_OWN * 32)),
        changing([ValueSlot("float32", [_OWN, 4], 7)], _ROWS_OF_FLOATS[1]),
        changing([_ROWS_OF_FLOATS[0]] * 2, _ROWS_OF_FLOATS[1], _ROWS_OF_FLOATS[1]),
        lambda _head: packed(ContinueReply(), [bytes(1000)]),
        lambda _head: packed(ContinueReply(["made.up"] * 60_000)),
        lambda _head: packed(Collected("printed", "failed")),
        lambda _head: [b"\xff\xff\xff\xff", b"no head"],
        lambda _head: [b"\0"],
        lambda _head: packed(ContinueReply(ended=cast("Any", [1, 2]))),
        lambda _head: packed(cast("Any", SandboxReply("own", 0, None, ""))),
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
    after = world.dispatcher.provide(_LAYER, value)
    assert torch.equal(after, torch.arange(4.0 * _ROWS).view(_ROWS, 4))
    assert world.error()
    assert world.dispatcher.wanted == {}


def test_it_changes_its_own_rows(world: World) -> None:
    world.begin(wanting(_LAYER, then=changing([_ROWS_OF_FLOATS[0]], _ROWS_OF_FLOATS[1])))
    world.step()
    after = world.dispatcher.provide(_LAYER, torch.zeros(_ROWS, 4))
    assert after.sum(1).tolist() == [4.0, 4.0, 4.0, 0.0, 0.0]
    assert world.cell.error is None


@pytest.mark.parametrize("number", [2**40, -1, 3])
def test_positions_are_not_changed(world: World, number: int) -> None:
    slot, content = slot_of(torch.full((_OWN,), number))
    world.begin(wanting(_POSITIONS, then=changing([slot], content)))
    world.step()
    after = world.dispatcher.provide(_POSITIONS, torch.arange(_ROWS))
    assert after.tolist() == [0, 1, 2, 3, 4]
    assert "integers" in world.error()


@pytest.mark.parametrize("number", [_TOKENS, 10**9, -1])
def test_tokens_that_there_are_not_are_not_sampled(world: World, number: int) -> None:
    slot, content = slot_of(torch.full((_OWN,), number))
    world.begin(wanting(_SAMPLES, then=changing([slot], content)))
    world.step()
    assert world.dispatcher.provide(_SAMPLES, torch.arange(_ROWS)).tolist() == [0, 1, 2, 3, 4]
    assert f"tokens are from 0 to {_TOKENS - 1}" in world.error()


def test_tokens_that_there_are_can_be_sampled(world: World) -> None:
    slot, content = slot_of(torch.full((_OWN,), _TOKENS - 1))
    world.begin(wanting(_SAMPLES, then=changing([slot], content)))
    world.step()
    assert world.dispatcher.provide(_SAMPLES, torch.arange(_ROWS)).tolist() == [99, 99, 99, 3, 4]


def _calls_without_end(side: SandboxSide) -> None:
    side.receive()
    side.send(packed(ContinueReply([_LAYER], live=["own"])))
    side.receive()
    one = b"".join(packed(CallRequest("model.layers.0", [], {})))
    while True:  # without waiting for what it is given
        side.send([one])


def _calls_and_reads_nothing(side: SandboxSide) -> None:
    side.receive()
    side.send(packed(ContinueReply([_LAYER], live=["own"])))
    one = b"".join(packed(CallRequest("nowhere", [], {})))
    while True:  # the answers fill the socket
        side.send([one])


def test_the_step_does_not_wait_for_a_process_that_reads_nothing(world: World) -> None:
    world.served.lasts_s = 0
    world.begin(_calls_and_reads_nothing, never_rests=True)
    started = time.monotonic()
    world.step()
    assert time.monotonic() - started < _LATEST_S
    assert world.cell.error is not None


@pytest.mark.parametrize(("num_bytes", "is_ended"), [(1000, False), (1001, True)])
def test_a_call_with_more_than_it_may_have_ends_the_process(
    world: World, num_bytes: int, is_ended: bool
) -> None:
    def lie(side: SandboxSide) -> None:
        side.receive()
        side.send(packed(ContinueReply([_LAYER], live=["own"])))
        side.receive()
        slot, content = slot_of(torch.zeros(num_bytes, dtype=torch.uint8))
        side.send(packed(CallRequest("model.lm_head", [slot], {}), [content]))
        side.receive()
        side.send(packed(ContinueReply([])))

    world.begin(lie)
    world.step()
    assert (world.cell.error is not None) == is_ended
    assert (world.served.num_calls == 0) == is_ended


def _drips(side: SandboxSide) -> None:
    side.receive()
    data = struct.pack("<QQ", 60_000, 0) + bytes(60_000)
    for at in range(len(data)):
        os.write(side._descriptor, data[at : at + 1])
        time.sleep(0.0004)


@pytest.mark.parametrize("lie", [_calls_without_end, _drips])
def test_the_step_waits_no_longer_than_it_may(world: World, lie: Lie) -> None:
    world.served.lasts_s = 0.02
    world.begin(lie, never_rests=True)
    started = time.monotonic()
    world.step()
    assert time.monotonic() - started < _LATEST_S
    assert "longer than" in world.error()


def test_a_call_that_would_take_too_long_is_refused_in_the_block(world: World) -> None:
    refused: list[Any] = []

    def lie(side: SandboxSide) -> None:
        side.receive()
        side.send(packed(ContinueReply([_LAYER], live=["own"])))
        side.receive()
        side.send(packed(CallRequest("model.lm_head", [], {})))
        head, _ = read_by_sandbox(side.receive())
        refused.append(head)
        side.send(packed(ContinueReply([])))

    world.served.lasts_s = _BUDGET_S / 6  # each of its eight rows
    world.begin(lie)
    world.step()
    assert world.cell.error is None
    assert world.served.num_calls < _CALL_ROWS
    assert "`model.lm_head` was called with 8 rows" in str(refused[0].error["message"])


def test_a_call_is_made_of_parts_between_which_others_are_served(world: World) -> None:
    def lie(side: SandboxSide) -> None:
        side.receive()
        side.send(packed(ContinueReply([_LAYER], live=["own"])))
        side.receive()
        side.send(packed(CallRequest("model.lm_head", [], {})))
        while True:
            side.receive()
            side.send(packed(ContinueReply([])))

    world.served.lasts_s = _BUDGET_S / 30
    world.waiting = WaitBudget(_BUDGET_S / 60, 5 * _BUDGET_S)
    world.begin(lie)
    world.cell.begin([("own", TraceEntry("key", 0, 1, b"", [{}]))])
    world.listen()
    counts = [0]
    give_up = time.monotonic() + 60
    while counts[-1] < _CALL_ROWS and time.monotonic() < give_up:
        world.go([TraceSpan("own", 0, 0, _OWN, 0, complete=True)], is_bound=False)
        world.end()
        counts.append(world.served.num_calls)
    assert counts[-1] == _CALL_ROWS
    assert max(later - before for before, later in itertools.pairwise(counts)) == 1
    assert world.cell.error is None


def _in_its_time(offered: list[str], may_answer: threading.Event) -> Lie:
    """Double what is offered, at the second place not before it may; note this, and who arrives later."""

    def lie(side: SandboxSide) -> None:
        side.receive()
        side.send(packed(ContinueReply([_LAYER], live=["own", "other"])))
        while True:
            head, body = read_by_sandbox(side.receive())
            if not isinstance(head, Offer):
                offered.extend(name for name, _ in getattr(head, "arrived", []))
                side.send(packed(ContinueReply()))
                continue
            offered.append(head.provider)
            if head.provider == _LATER:
                may_answer.wait(60)
            assert head.slots is not None
            slot, content = slot_of(2 * Tensors(body).next(head.slots[0]))
            is_last = head.provider == _LATER
            go = ContinueReply([_LAYER if is_last else _LATER], changes=[slot], is_over=is_last)
            side.send(packed(go, [content]))

    return lie


def _spans(names: Sequence[str]) -> list[TraceSpan]:
    """Return three rows of the step's five, of one request or of two."""
    if len(names) == 1:
        return [TraceSpan(names[0], 0, 0, _OWN, 7, complete=True)]
    return [
        TraceSpan(names[0], 0, 0, _OWN - 1, 7, complete=True),
        TraceSpan(names[1], 1, _OWN - 1, 1, 4, complete=True),
    ]


def _deferred(world: World, offered: list[str], names: Sequence[str] = ("own",)) -> threading.Event:
    """Run a step that goes on without the process from its second place on; returns what it waits for."""
    may_answer = threading.Event()
    world.begin(_in_its_time(offered, may_answer))
    world.cell.begin([(name, TraceEntry("key", 0, 1, b"", [{}] * 2)) for name in names])
    world.listen()  # it has read its blocks
    world.waiting = WaitBudget(60, 60)
    world.go(_spans(names), is_bound=False)
    assert world.dispatcher.provide(_LAYER, torch.ones(_ROWS, 4))[:, 0].tolist() == [2, 2, 2, 1, 1]
    world.waiting = WaitBudget(_SHORT_S, 60)
    world.waiting.begin()
    assert world.dispatcher.provide(_LATER, torch.ones(_ROWS, 4))[:, 0].tolist() == [1, 1, 1, 1, 1]
    return may_answer


def test_a_step_goes_on_without_a_process_that_takes_long_and_is_computed_again(world: World) -> None:
    offered: list[str] = []
    may_answer = _deferred(world, offered)
    assert (world.cell.undone, world.cell.waiting) == (["own"], {"own"})
    assert world.end() == ([], {})
    world.dispatcher.begin()  # a step of others', who stand where its rows were
    assert world.dispatcher.provide(_LAYER, torch.ones(_ROWS, 4)).eq(1).all()
    assert world.dispatcher.provide(_LATER, torch.ones(_ROWS, 4)).eq(1).all()
    may_answer.set()
    world.listen()
    assert world.cell.waiting == set()
    world.go([TraceSpan("own", 1, 2, _OWN, 7, complete=True)], is_bound=False)
    assert world.dispatcher.provide(_LAYER, torch.ones(_ROWS, 4))[:, 0].tolist() == [1, 1, 2, 2, 2]
    assert world.dispatcher.provide(_LATER, torch.ones(_ROWS, 4))[:, 0].tolist() == [1, 1, 2, 2, 2]
    assert (world.cell.undone, world.end()) == ([], ([], {}))
    assert offered == [_LAYER, _LATER], "it sees each value once"


@pytest.mark.parametrize(
    "span", [TraceSpan("own", 0, 0, _OWN, 6, complete=True), TraceSpan("own", 0, 0, 2, 7, complete=True)]
)
def test_a_step_that_is_not_the_one_that_was_left_is_not_gone_on_with(world: World, span: TraceSpan) -> None:
    may_answer = _deferred(world, [])
    world.end()
    may_answer.set()
    world.listen()
    world.go([span], is_bound=False)
    assert world.dispatcher.provide(_LAYER, torch.ones(_ROWS, 4)).eq(1).all()
    assert (world.cell.error is not None) == (span.start != 7)
    assert world.cell.undone == ([] if world.cell.error else ["own"])


def _ready_again(world: World, names: Sequence[str] = ("own",)) -> None:
    """Have a step go on without the process, which has answered since."""
    may_answer = _deferred(world, [], names)
    world.end()
    may_answer.set()
    world.listen()


def test_a_deferred_trace_of_which_a_request_has_ended_fails_and_does_not_wait_for_it(world: World) -> None:
    _ready_again(world, ("own", "other"))
    world.cell.live.discard("other")  # its client has left
    world.go([TraceSpan("own", 0, 0, _OWN - 1, 7, complete=True)], is_bound=False)
    assert "a step had to be computed again" in world.error()


def test_a_deferred_trace_whose_step_never_comes_again_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_module, "_MAX_MISFITS", 3)
    _ready_again(world)
    shorter = TraceSpan("own", 0, 0, _OWN - 1, 7, complete=True)
    for _ in range(3):
        world.go([shorter], is_bound=False)
        assert world.cell.undone == ["own"]
        assert world.end() == ([], {})
    world.go([shorter], is_bound=False)
    assert "a step had to be computed again" in world.error()


def test_a_deferred_step_that_comes_after_others_is_gone_on_with(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_module, "_MAX_MISFITS", 3)
    _ready_again(world)
    for _ in range(2):
        world.go([TraceSpan("own", 0, 0, _OWN - 1, 7, complete=True)], is_bound=False)
        world.end()
    world.go(_spans(["own"]), is_bound=False)
    for place in (_LAYER, _LATER):
        assert world.dispatcher.provide(place, torch.ones(_ROWS, 4))[:, 0].tolist() == [2, 2, 2, 1, 1]
    assert (world.cell.error, world.cell.undone) == (None, [])


def test_requests_that_arrive_while_a_trace_is_deferred_are_told_of_before_their_step(world: World) -> None:
    offered: list[str] = []
    may_answer = _deferred(world, offered)
    world.end()
    world.cell.begin([("later", TraceEntry("key", 1, 1, b"", [{}] * 2))])
    may_answer.set()
    world.listen()
    world.go(_spans(["own"]), is_bound=False)
    for place in (_LAYER, _LATER):
        world.dispatcher.provide(place, torch.ones(_ROWS, 4))
    world.end()
    assert offered == [_LAYER, _LATER], "in the middle of a step it reads nothing"
    world.go([TraceSpan("later", 0, 0, 1, 0, complete=True)])
    assert offered == [_LAYER, _LATER, "later"]
    assert world.cell.error is None


@pytest.mark.parametrize("is_bound", [True, False])
@pytest.mark.parametrize("is_single_tenant", [True, False])
def test_a_tenant_rests_whose_trace_has_held_others_up(
    world: World, is_bound: bool, is_single_tenant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_module, "_REST", 1000.0)

    def slow(side: SandboxSide) -> None:
        side.receive()
        side.send(packed(ContinueReply([], live=["own"])))
        while True:
            side.receive()
            time.sleep(0.2)
            side.send(packed(ContinueReply([])))

    world.begin(slow)
    world.cell.begin([("own", TraceEntry("key", 0, 1, b"", [{}]))])
    world.listen()
    world.waiting = WaitBudget(_SHORT_S, 60)
    assert world.waiting.throttled == frozenset()
    world.go(
        [TraceSpan("own", 0, 0, _OWN, 7, complete=True)], is_bound=is_bound, is_single_tenant=is_single_tenant
    )
    world.listen()
    holds_up = is_bound and not is_single_tenant
    assert world.waiting.throttled == (frozenset({"acme"}) if holds_up else frozenset())
    moment = time.monotonic() + 1e6
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    assert world.waiting.throttled == frozenset()


def test_requests_that_arrive_together_share_one_step(world: World) -> None:
    told: list[int] = []

    def slow(side: SandboxSide) -> None:
        while True:
            head, _ = read_by_sandbox(side.receive())
            if isinstance(head, BeginRequests):
                told.append(len(head.arrived))
            world.process.used_s += 0.75 * _BUDGET_S
            side.send(packed(ContinueReply([], live=[f"own{number}" for number in range(20)])))

    world.begin(slow)
    for number in range(20):
        world.cell.begin([(f"own{number}", TraceEntry("key", number, 1, b"", [{}] * 20))])
    world.go([TraceSpan("own0", 0, 0, _OWN, 0, complete=True)])
    assert told == [1, 19]
    assert world.end() == ([], {})
    assert world.cell.error is None


def test_a_trace_is_waited_for_no_longer_than_one_may(world: World) -> None:
    def slow(side: SandboxSide) -> None:
        while True:
            side.receive()
            world.process.used_s += 0.5 * _BUDGET_S
            side.send(packed(ContinueReply([], live=["own"])))

    world.begin(slow)
    world.step()
    for _ in range(20):
        world.end()
        world.go([TraceSpan("own", 0, 0, _OWN, 0, complete=True)])
    assert "as long as it does for one trace" in str(world.cell.error)


def test_it_speaks_for_its_own_requests_only(world: World) -> None:
    def lie(side: SandboxSide) -> None:
        while True:
            head, _ = read_by_sandbox(side.receive())
            told = [SandboxReply("other", 0, b"data", "printed"), SandboxReply("own", 0, b"data", "printed")]
            go = ContinueReply([_LAYER, "made.up", "result"], ended=["other"], reports=told)
            side.send(
                packed(
                    msgspec.structs.replace(go, live=["own", "other"]) if type(head) is BeginRequests else go
                )
            )

    world.begin(lie)
    world.step()
    assert world.cell.live == {"own"}
    assert list(world.dispatcher.wanted) == [_LAYER]
    assert world.end() == ([], {"own": ("key", 0, b"data", "printed")})


@pytest.mark.parametrize(
    "reply", [SandboxReply("own", 0, b"data", ""), SandboxReply("own", 0, None, "printed")]
)
def test_reports_that_nobody_asked_for_are_not_passed_on(world: World, reply: SandboxReply) -> None:
    def lie(side: SandboxSide) -> None:
        side.receive()
        side.send(packed(ContinueReply([_LAYER], live=["own"])))
        while True:
            side.receive()
            side.send(packed(ContinueReply(reports=[reply])))

    world.begin(lie)
    world.cell.begin([("own", TraceEntry("key", 0, 1, b"", [{}]))])
    world.go([TraceSpan("own", 0, 0, _OWN, 0, complete=True)])
    world.dispatcher.provide(_LAYER, torch.zeros(_ROWS, 4))
    world.cell.finish()
    world.waiting.wait([world.cell])
    assert "reported what nobody asked for" in world.error()


def test_a_call_with_more_bytes_than_its_arguments_have_is_refused(world: World) -> None:
    slot, content = slot_of(torch.ones(_CALL_ROWS, 2))
    world.begin(
        wanting(_LAYER, then=lambda _: packed(CallRequest("model.lm_head", [slot], {}), [content, b"more"]))
    )
    world.step()
    world.dispatcher.provide(_LAYER, torch.zeros(_ROWS, 4))
    assert "bytes that nobody asked for" in world.error()
    assert world.served.num_calls == 0


@pytest.mark.parametrize("is_again", [False, True])
def test_a_block_that_calls_a_module_behind_its_last_step_is_collected(world: World, is_again: bool) -> None:
    def lie(side: SandboxSide) -> None:
        side.receive()
        side.send(packed(ContinueReply([], live=["own"])))
        side.receive()
        for _ in range(1 + is_again):
            side.send(packed(CallRequest("model.lm_head", [], {})))
            side.receive()
        side.send(packed(Collected("", ""), [b"saved"]))

    world.served.lasts_s = 0.01
    world.waiting = WaitBudget(_SHORT_S, 5 * _BUDGET_S)
    world.begin(lie)
    world.waiting.begin()
    world.cell.begin([("own", TraceEntry("key", 0, 1, b"", [{}]))])
    give_up = time.monotonic() + _LATEST_S
    while not world.cell.has_collected and time.monotonic() < give_up:
        world.cell.request_saved("key", {})
        world.waiting.wait_for_any([world.cell], 0.05)
    assert world.cell.error is None
    assert world.cell.has_collected
    assert world.served.num_calls == _CALL_ROWS * (1 + is_again)
    # Of the next step's budget, nothing is used.
    assert world.waiting.waited_s == 0


def test_what_it_says_last_is_no_longer_than_an_honest_one_s(world: World) -> None:
    def lie(side: SandboxSide) -> None:
        side.receive()
        side.send(packed(ContinueReply([], live=["own"])))
        side.receive()
        side.send(packed(Collected("p" * (MAX_BYTES + 1), "f" * 10_000), [b"saved"]))

    world.begin(lie)
    world.cell.begin([("own", TraceEntry("key", 0, 1, b"", [{}]))])
    while not world.cell.has_collected:
        world.cell.request_saved("key", {})
        world.waiting.wait_for_any([world.cell], 1.0)
    (content,), (printed, failure) = world.cell.saved()
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
