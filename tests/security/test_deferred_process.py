"""Steps that continue without a slow process, and are computed again once it has answered."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from nnsight_engine.sandbox.channel import SandboxSide
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.messages import Offer, Tensors, packed, slot_of
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.sandboxed import sandbox_session as session_module
from nnsight_engine.vllm_backend.traces.sandboxed.messages import ContinueReply, read_by_sandbox
from nnsight_engine.vllm_backend.traces.sandboxed.wait_budget import WaitBudget
from tests.security.played_process import LATER, LAYER, NUM_OWN, NUM_ROWS, SHORT_S, Script, World


def _in_its_time(offered: list[str], may_answer: threading.Event) -> Script:
    """Double what is offered, at the second place not before it may; note this, and who arrives later."""

    def lie(side: SandboxSide) -> None:
        side.receive()
        side.send(packed(ContinueReply([LAYER], live=["own", "other"])))
        while True:
            head, body = read_by_sandbox(side.receive())
            if not isinstance(head, Offer):
                offered.extend(name for name, _ in getattr(head, "arrived", []))
                side.send(packed(ContinueReply()))
                continue
            offered.append(head.provider)
            if head.provider == LATER:
                may_answer.wait(60)
            assert head.slots is not None
            slot, content = slot_of(2 * Tensors(body).next(head.slots[0]))
            is_last = head.provider == LATER
            go = ContinueReply([LAYER if is_last else LATER], changes=[slot], is_over=is_last)
            side.send(packed(go, [content]))

    return lie


def _spans(names: Sequence[str]) -> list[TraceSpan]:
    """Return three rows of the step's five, of one request or of two."""
    if len(names) == 1:
        return [TraceSpan(names[0], 0, 0, NUM_OWN, 7, complete=True)]
    return [
        TraceSpan(names[0], 0, 0, NUM_OWN - 1, 7, complete=True),
        TraceSpan(names[1], 1, NUM_OWN - 1, 1, 4, complete=True),
    ]


def _deferred(world: World, offered: list[str], names: Sequence[str] = ("own",)) -> threading.Event:
    """Run a step that goes on without the process from its second place on; returns what it waits for."""
    may_answer = threading.Event()
    world.begin(_in_its_time(offered, may_answer))
    world.session.send_requests(
        [(name, TraceEntry("key", 0, 1, b"", [{}] * 2, sandbox_of=None)) for name in names]
    )
    world.listen()  # it has read its blocks
    world.waiting = WaitBudget(60, 60)
    world.go(_spans(names), is_bound=False)
    assert world.dispatcher.provide(LAYER, torch.ones(NUM_ROWS, 4))[:, 0].tolist() == [2, 2, 2, 1, 1]
    world.waiting = WaitBudget(SHORT_S, 60)
    world.waiting.begin_step()
    assert world.dispatcher.provide(LATER, torch.ones(NUM_ROWS, 4))[:, 0].tolist() == [1, 1, 1, 1, 1]
    return may_answer


@pytest.mark.parametrize(
    "span", [TraceSpan("own", 0, 0, NUM_OWN, 6, complete=True), TraceSpan("own", 0, 0, 2, 7, complete=True)]
)
def test_a_step_that_is_not_the_one_that_was_left_is_not_gone_on_with(world: World, span: TraceSpan) -> None:
    may_answer = _deferred(world, [])
    world.end()
    may_answer.set()
    world.listen()
    world.go([span], is_bound=False)
    assert world.dispatcher.provide(LAYER, torch.ones(NUM_ROWS, 4)).eq(1).all()
    assert (world.session.error is not None) == (span.start != 7)
    assert world.session.undone == ([] if world.session.error else ["own"])


def _ready_again(world: World, names: Sequence[str] = ("own",)) -> None:
    """Have a step go on without the process, which has answered since."""
    may_answer = _deferred(world, [], names)
    world.end()
    may_answer.set()
    world.listen()


def test_a_deferred_trace_of_which_a_request_has_ended_fails_and_does_not_wait_for_it(world: World) -> None:
    _ready_again(world, ("own", "other"))
    world.session.live.discard("other")  # its client has left
    world.go([TraceSpan("own", 0, 0, NUM_OWN - 1, 7, complete=True)], is_bound=False)
    assert "a step had to be computed again" in world.error()


def test_a_deferred_trace_whose_step_never_comes_again_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_MAX_MISFITS", 3)
    _ready_again(world)
    shorter = TraceSpan("own", 0, 0, NUM_OWN - 1, 7, complete=True)
    for _ in range(3):
        world.go([shorter], is_bound=False)
        assert world.session.undone == ["own"]
        assert world.end() == ([], {})
    world.go([shorter], is_bound=False)
    assert "a step had to be computed again" in world.error()


def test_a_deferred_step_that_comes_after_others_is_gone_on_with(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_MAX_MISFITS", 3)
    _ready_again(world)
    for _ in range(2):
        world.go([TraceSpan("own", 0, 0, NUM_OWN - 1, 7, complete=True)], is_bound=False)
        world.end()
    world.go(_spans(["own"]), is_bound=False)
    for place in (LAYER, LATER):
        assert world.dispatcher.provide(place, torch.ones(NUM_ROWS, 4))[:, 0].tolist() == [2, 2, 2, 1, 1]
    assert (world.session.error, world.session.undone) == (None, [])


def test_requests_that_arrive_while_a_trace_is_deferred_are_told_of_before_their_step(world: World) -> None:
    offered: list[str] = []
    may_answer = _deferred(world, offered)
    world.end()
    world.arrive("later", 1, 2)
    may_answer.set()
    world.listen()
    world.go(_spans(["own"]), is_bound=False)
    for place in (LAYER, LATER):
        world.dispatcher.provide(place, torch.ones(NUM_ROWS, 4))
    world.end()
    assert offered == [LAYER, LATER], "in the middle of a step it reads nothing"
    world.go([TraceSpan("later", 0, 0, 1, 0, complete=True)])
    assert offered == [LAYER, LATER, "later"]
    assert world.session.error is None
