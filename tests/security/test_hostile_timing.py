"""A process that takes, or costs, too much time: its trace is ended or waits, and no step waits long."""

from __future__ import annotations

import itertools
import os
import select
import struct
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnsight_engine.sandbox.channel import EngineSide, SandboxSide
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.vllm_backend.traces.messages import packed, slot_of
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.sandboxed import connection as connection_module
from nnsight_engine.vllm_backend.traces.sandboxed import wait_budget as waiting_module
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    BeginRequests,
    CallRequest,
    Collected,
    ContinueReply,
    read_by_sandbox,
)
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_session import SandboxSession
from nnsight_engine.vllm_backend.traces.sandboxed.wait_budget import WaitBudget
from tests.security.played_process import (
    BUDGET_S,
    CALL_ROWS,
    LAYER,
    NUM_OWN,
    NUM_ROWS,
    OWN,
    SHORT_S,
    WANTING,
    Message,
    Script,
    World,
    replying,
    wanting,
)
from tests.waiting import wait_for

CALL: Message = packed(CallRequest("model.lm_head", [], {}))


def _calls_without_end(side: SandboxSide) -> None:
    side.receive()
    side.send(WANTING)
    side.receive()
    one = b"".join(packed(CallRequest("model.layers.0", [], {})))
    while True:  # without waiting for what it is given
        side.send([one])


def _calls_and_reads_nothing(side: SandboxSide) -> None:
    side.receive()
    side.send(WANTING)
    one = b"".join(packed(CallRequest("nowhere", [], {})))
    while True:  # the answers fill the socket
        side.send([one])


def test_the_step_does_not_wait_for_a_process_that_reads_nothing(world: World) -> None:
    world.served.lasts_s = 0
    world.begin(_calls_and_reads_nothing, never_rests=True)
    world.step()
    assert world.session.error is not None


def _drips(side: SandboxSide) -> None:
    side.receive()
    data = struct.pack("<QQ", 60_000, 0) + bytes(60_000)
    for at in range(len(data)):
        os.write(side._descriptor, data[at : at + 1])
        time.sleep(0.0004)


@pytest.mark.parametrize("lie", [_calls_without_end, _drips])
def test_the_step_waits_no_longer_than_it_may(world: World, lie: Script) -> None:
    world.served.lasts_s = 0.02
    world.begin(lie, never_rests=True)
    world.step()
    assert "longer than" in world.error()


def test_a_call_that_would_take_too_long_is_refused_in_the_block(world: World) -> None:
    refused: list[Any] = []

    def lie(side: SandboxSide) -> None:
        side.receive()
        side.send(WANTING)
        side.receive()
        side.send(CALL)
        head, _ = read_by_sandbox(side.receive())
        refused.append(head)
        side.send(packed(ContinueReply([])))

    world.served.lasts_s = BUDGET_S / 6  # each of its eight rows
    world.begin(lie)
    world.step()
    assert world.session.error is None
    assert world.served.num_calls < CALL_ROWS
    assert "`model.lm_head` was called with 8 rows" in str(refused[0].error["message"])


def test_a_call_is_made_of_parts_between_which_others_are_served(world: World) -> None:
    world.served.lasts_s = BUDGET_S / 30
    world.waiting = WaitBudget(BUDGET_S / 60, 5 * BUDGET_S)
    world.begin(replying(WANTING, CALL, *[packed(ContinueReply([]))] * 1000))
    world.arrive()
    world.listen()
    counts = [0]

    def step() -> bool:
        world.go([OWN], is_bound=False)
        world.end()
        counts.append(world.served.num_calls)
        return counts[-1] == CALL_ROWS

    wait_for(step)
    assert max(later - before for before, later in itertools.pairwise(counts)) == 1
    assert world.session.error is None


@pytest.mark.parametrize("is_bound", [True, False])
@pytest.mark.parametrize("is_single_tenant", [True, False])
def test_a_tenant_rests_whose_trace_has_held_others_up(
    world: World, is_bound: bool, is_single_tenant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_module, "_REST", 1000.0)

    def slow(side: SandboxSide) -> None:
        while True:
            side.receive()
            time.sleep(0.2)
            side.send(packed(ContinueReply([], live=["own"])))

    world.begin(slow)
    world.arrive()
    world.listen()
    world.waiting = WaitBudget(SHORT_S, 60)
    assert world.waiting.throttled == frozenset()
    world.go(
        [TraceSpan("own", 0, 0, NUM_OWN, 7, complete=True)],
        is_bound=is_bound,
        is_single_tenant=is_single_tenant,
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
            world.process.used_s += 0.75 * BUDGET_S
            side.send(packed(ContinueReply([], live=[f"own{number}" for number in range(20)])))

    world.begin(slow)
    for number in range(20):
        world.arrive(f"own{number}", number, 20)
    world.go([TraceSpan("own0", 0, 0, NUM_OWN, 0, complete=True)])
    assert told == [1, 19]
    assert world.end() == ([], {})
    assert world.session.error is None


def test_a_trace_is_waited_for_no_longer_than_one_may(world: World) -> None:
    def slow(side: SandboxSide) -> None:
        while True:
            side.receive()
            world.process.used_s += 0.5 * BUDGET_S
            side.send(packed(ContinueReply([], live=["own"])))

    world.begin(slow)
    world.step()
    for _ in range(20):
        world.end()
        world.go([OWN])
    assert "as long as it does for one trace" in str(world.session.error)


@pytest.mark.parametrize("is_again", [False, True])
def test_a_block_that_calls_a_module_behind_its_last_step_is_collected(world: World, is_again: bool) -> None:
    world.served.lasts_s = 0.01
    world.waiting = WaitBudget(SHORT_S, 5 * BUDGET_S)
    world.begin(replying(WANTING, *[CALL] * (1 + is_again), packed(Collected("", ""), [b"saved"])))
    world.waiting.begin_step()
    world.arrive()
    wait_for(world.has_collected)
    assert world.session.error is None
    assert world.served.num_calls == CALL_ROWS * (1 + is_again)
    # Of the next step's budget, nothing is used, and nobody rests for what no step waited for.
    assert world.waiting.waited_s == 0
    world.waiting.end_step()
    assert not world.waiting.throttled


def _answers_at_once(side: SandboxSide) -> None:
    while True:
        side.receive()
        side.send(packed(ContinueReply([], live=["own"])))


def _answered(world: World, count: int, tenant: str) -> list[SandboxSession]:
    """Return traces of a tenant whose processes have answered, which the worker has not read yet."""
    sessions = []
    for _ in range(count):
        world.begin(_answers_at_once, tenant=tenant)
        world.arrive()
        assert select.select([world.session.connection], [], [], 60)[0]
        sessions.append(world.session)
    return sessions


@pytest.mark.parametrize("wait_s", [1e-9, 60.0])
def test_many_processes_of_a_tenant_cost_a_step_no_more_than_one_may(
    world: World, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their messages are copied by the worker: beyond the tenant's budget no more of them are read."""
    monkeypatch.setattr(waiting_module, "_REST", 1e9)
    many, other = _answered(world, 4, "acme"), _answered(world, 1, "other")
    waiting = WaitBudget(wait_s, 60)
    waiting.begin_step()
    waiting.take_arrived([*many, *other])
    for session in many:
        session.can_be_deferred = True
    waiting.wait(many)
    num_unread = sum(session.connection.is_pending for session in many)
    waiting.end_step()
    assert num_unread == (3 if wait_s < 1 else 0)
    assert not other[0].connection.is_pending
    assert ("acme" in waiting.throttled) == (wait_s < 1)
    waiting.wait_for_any(many, 60)
    waiting.begin_step()
    waiting.end_step()
    waiting.begin_step()
    waiting.wait_for_any(many, 60)
    assert sum(session.connection.is_pending for session in many) <= max(num_unread - 1, 0)


def test_many_processes_of_a_tenant_are_waited_for_as_long_as_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = _answered(world, 6, "acme")
    now_s = 0.0

    def ready(_: object, wait_s: float) -> list[SandboxSession]:
        nonlocal now_s
        now_s += wait_s
        return []

    monkeypatch.setattr(waiting_module, "_ready", ready)
    monkeypatch.setattr(waiting_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    waiting = WaitBudget(2.0, 60)
    waiting.begin_step()
    for session in many:
        session.can_be_deferred = True
    for session in many:
        waiting.wait([session])
    waiting.wait(many)
    assert waiting.waited_s == now_s == 2.0


class _SlowSide(EngineSide):
    """A channel whose messages take long to copy."""

    def take_answer(self, max_bytes: int) -> bytes | None:
        data = super().take_answer(max_bytes)
        end = time.thread_time() + BUDGET_S / 5
        while data is not None and time.thread_time() < end:
            pass
        return data


def test_the_time_to_read_the_messages_of_a_process_is_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_WALL", 1e9)

    world.begin(replying(WANTING, *[CALL] * 20, packed(ContinueReply([]))), side=_SlowSide)
    world.waiting = WaitBudget(60, 60)
    world.step()
    assert "longer than" in world.error()


@pytest.mark.parametrize("complete", [True, False])
def test_a_request_waits_for_a_process_and_the_step_does_not(world: World, complete: bool) -> None:
    slot, content = slot_of(torch.ones(NUM_OWN, 4))
    world.begin(
        wanting(LAYER, then=lambda _: packed(ContinueReply(changes=[slot]), [content])), is_ready=False
    )
    world.waiting = WaitBudget(600, 600)
    world.arrive()
    span = TraceSpan("own", 0, 0, NUM_OWN, 0, complete=complete)
    for _ in range(3):
        world.go([span], is_bound=False)
        assert (world.session.undone, world.session.waiting) == (["own"], {"own"})
        assert world.dispatcher.provide(LAYER, torch.zeros(NUM_ROWS, 4)).eq(0).all()
        assert world.end() == ([], {})
    world.source.let()
    world.listen()
    world.go([span], is_bound=False)
    after = world.dispatcher.provide(LAYER, torch.zeros(NUM_ROWS, 4))
    assert after.sum(1).tolist() == [4.0, 4.0, 4.0, 0.0, 0.0]
    assert (world.session.undone, world.session.error) == ([], None)


def test_a_step_that_cannot_be_repeated_waits_for_a_process_no_longer_than_for_an_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_module, "_REST", 1000.0)
    world.begin(_answers_at_once, is_ready=False)
    world.waiting = WaitBudget(SHORT_S, 0.1)
    world.step()
    assert isinstance(world.session.error, SandboxUnavailableError)
    assert world.end() == (["own"], {})
    assert world.waiting.throttled == {"acme"}
    assert world.session.close() is None


def test_a_step_that_cannot_be_repeated_continues_with_the_process_that_became_ready(world: World) -> None:
    world.begin(_answers_at_once, is_ready=False)
    world.waiting = WaitBudget(SHORT_S, 60)
    threading.Timer(0.1, world.source.let).start()
    world.step()
    assert (world.session.error, world.session.undone) == (None, [])
    assert world.end() == ([], {})
