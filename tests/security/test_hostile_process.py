"""Messages of a hostile process: it is ended, and no other request is affected."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
import torch

from nnsight_engine.remote_backend.unread_output import MAX_PRINTED_BYTES
from nnsight_engine.sandbox.channel import Memory, SandboxSide
from nnsight_engine.vllm_backend.traces.messages import ValueSlot, packed, slot_of
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    BeginRequests,
    CallRequest,
    Collected,
    ContinueReply,
    SandboxReply,
    read_by_sandbox,
)
from tests.security.played_process import (
    CALL_ROWS,
    HALF_BYTES,
    LAYER,
    NUM_OWN,
    NUM_ROWS,
    NUM_TOKENS,
    OWN,
    POSITIONS,
    SAMPLES,
    WANTING,
    Message,
    World,
    replying,
    wanting,
)


def changing(slots: list[ValueSlot], *bodies: bytes | memoryview) -> Callable[[Any], Message]:
    return lambda _head: packed(ContinueReply(changes=slots), bodies)


_ROWS_OF_FLOATS = slot_of(torch.ones(NUM_OWN, 4))


@pytest.mark.parametrize(
    "then",
    [
        changing([ValueSlot("float32", [0, 2**62, 2**62])]),
        changing([ValueSlot("float32", [0, 2**63])]),
        changing([ValueSlot("float32", [NUM_OWN, 4])]),
        changing([ValueSlot("float32", [NUM_ROWS, 4])], bytes(NUM_ROWS * 16)),
        changing([ValueSlot("float32", [-1, -4])], bytes(16)),
        changing([ValueSlot("complex64", [NUM_OWN, 4])], bytes(NUM_OWN * 32)),
        changing([ValueSlot("float32", [NUM_OWN, 4], 7)], _ROWS_OF_FLOATS[1]),
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
def test_what_it_says_of_a_value_ends_it_alone(world: World, then: Callable[[Any], Message]) -> None:
    world.begin(wanting(LAYER, then=then))
    world.step()
    value = torch.arange(4.0 * NUM_ROWS).view(NUM_ROWS, 4)
    after = world.dispatcher.provide(LAYER, value)
    assert torch.equal(after, torch.arange(4.0 * NUM_ROWS).view(NUM_ROWS, 4))
    assert world.error()
    assert world.dispatcher.wanted == {}


def test_it_changes_its_own_rows(world: World) -> None:
    world.begin(wanting(LAYER, then=changing([_ROWS_OF_FLOATS[0]], _ROWS_OF_FLOATS[1])))
    world.step()
    after = world.dispatcher.provide(LAYER, torch.zeros(NUM_ROWS, 4))
    assert after.sum(1).tolist() == [4.0, 4.0, 4.0, 0.0, 0.0]
    assert world.session.error is None


@pytest.mark.parametrize("number", [2**40, -1, 3])
def test_positions_are_not_changed(world: World, number: int) -> None:
    slot, content = slot_of(torch.full((NUM_OWN,), number))
    world.begin(wanting(POSITIONS, then=changing([slot], content)))
    world.step()
    after = world.dispatcher.provide(POSITIONS, torch.arange(NUM_ROWS))
    assert after.tolist() == [0, 1, 2, 3, 4]
    assert "integers" in world.error()


@pytest.mark.parametrize("number", [NUM_TOKENS, 10**9, -1])
def test_tokens_that_there_are_not_are_not_sampled(world: World, number: int) -> None:
    slot, content = slot_of(torch.full((NUM_OWN,), number))
    world.begin(wanting(SAMPLES, then=changing([slot], content)))
    world.step()
    assert world.dispatcher.provide(SAMPLES, torch.arange(NUM_ROWS)).tolist() == [0, 1, 2, 3, 4]
    assert f"takes integers from 0 to {NUM_TOKENS - 1}" in world.error()


def test_tokens_that_there_are_can_be_sampled(world: World) -> None:
    slot, content = slot_of(torch.full((NUM_OWN,), NUM_TOKENS - 1))
    world.begin(wanting(SAMPLES, then=changing([slot], content)))
    world.step()
    assert world.dispatcher.provide(SAMPLES, torch.arange(NUM_ROWS)).tolist() == [99, 99, 99, 3, 4]


@pytest.mark.parametrize(("num_bytes", "is_ended"), [(1000, False), (1001, True)])
def test_a_call_with_more_than_it_may_have_ends_the_process(
    world: World, num_bytes: int, is_ended: bool
) -> None:
    slot, content = slot_of(torch.zeros(num_bytes, dtype=torch.uint8))
    call = packed(CallRequest("model.lm_head", [slot], {}), [content])
    world.begin(replying(WANTING, call, packed(ContinueReply([]))))
    world.step()
    assert (world.session.error is not None) == is_ended
    assert (world.served.num_calls == 0) == is_ended


def test_it_speaks_for_its_own_requests_only(world: World) -> None:
    def lie(side: SandboxSide) -> None:
        while True:
            head, _ = read_by_sandbox(side.receive())
            told = [SandboxReply("other", 0, b"data", "printed"), SandboxReply("own", 0, b"data", "printed")]
            go = ContinueReply([LAYER, "made.up", "result"], ended=["other"], reports=told)
            side.send(
                packed(
                    msgspec.structs.replace(go, live=["own", "other"]) if type(head) is BeginRequests else go
                )
            )

    world.begin(lie)
    world.step()
    assert world.session.live == {"own"}
    assert list(world.dispatcher.wanted) == [LAYER]
    assert world.end() == ([], {"own": ("key", 0, b"data", "printed")})


@pytest.mark.parametrize(
    "reply", [SandboxReply("own", 0, b"data", ""), SandboxReply("own", 0, None, "printed")]
)
def test_reports_that_nobody_asked_for_are_not_passed_on(world: World, reply: SandboxReply) -> None:
    world.begin(replying(WANTING, *[packed(ContinueReply(reports=[reply]))] * 9))
    world.arrive()
    world.go([OWN])
    world.dispatcher.provide(LAYER, torch.zeros(NUM_ROWS, 4))
    world.session.finish()
    world.waiting.wait([world.session])
    assert "reported what nobody asked for" in world.error()


def test_a_call_with_more_bytes_than_its_arguments_have_is_refused(world: World) -> None:
    slot, content = slot_of(torch.ones(CALL_ROWS, 2))
    world.begin(
        wanting(LAYER, then=lambda _: packed(CallRequest("model.lm_head", [slot], {}), [content, b"more"]))
    )
    world.step()
    world.dispatcher.provide(LAYER, torch.zeros(NUM_ROWS, 4))
    assert "bytes that nobody asked for" in world.error()
    assert world.served.num_calls == 0


def test_what_it_says_last_is_no_longer_than_an_honest_one_s(world: World) -> None:
    told = packed(Collected("p" * (MAX_PRINTED_BYTES + 1), "f" * 10_000), [b"saved"])
    world.begin(replying(packed(ContinueReply([], live=["own"])), told))
    world.arrive()
    while not world.session.has_collected:
        world.session.request_saved("key", {})
        world.waiting.wait_for_any([world.session], 1.0)
    (content,), (printed, failure) = world.session.saved()
    assert bytes(cast("memoryview", content)) == b"saved"
    assert (len(printed), len(failure)) == (MAX_PRINTED_BYTES, 2000)


def test_memory_is_given_back() -> None:
    shared = Memory.create(HALF_BYTES)
    ours, theirs = Memory(shared, HALF_BYTES), Memory(shared, HALF_BYTES)
    for number in range(2):
        theirs.half(number)[:] = b"\1" * HALF_BYTES
    before = os.fstat(shared).st_blocks
    ours.forget()
    assert (before * 512, os.fstat(shared).st_blocks) == (2 * HALF_BYTES, 0)
    assert bytes(theirs.half(1)) == bytes(HALF_BYTES)
    os.close(shared)
