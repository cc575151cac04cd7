"""The worker reads whatever a sandbox process sends: the process is ended at most, nothing else changes.

Hostile bytes are mutations of honest messages, and structures that no honest process sends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnsight_engine.sandbox.channel import EngineSide, Memory, SandboxSide
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.vllm_backend.traces.messages import ValueSlot, packed, slot_of
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    CallRequest,
    Collected,
    ContinueReply,
    SandboxReply,
    read_by_worker,
)
from tests.security.played_process import LAYER, NUM_ROWS, World, wanting
from tests.waiting import wait_for

_OWN: Final = 3
_HALF: Final = 2**16
_FEW: Final = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

_SLOT, _CONTENT = slot_of(torch.ones(_OWN, 4))
HONEST: Final = [
    b"".join(packed(ContinueReply([LAYER], changes=[_SLOT], ended=["own"]), [_CONTENT])),
    b"".join(
        packed(
            ContinueReply(reports=[SandboxReply("own", 0, b"data", "printed")], live=["own"], is_over=True)
        )
    ),
    b"".join(packed(CallRequest("model.lm_head", [_SLOT, 1, None, 0.5, "a"], {"b": _SLOT}), [_CONTENT] * 2)),
    b"".join(packed(Collected("printed", "failure"), [b"saved"])),
]
_NUMBERS: Final = st.sampled_from([0, 1, -1, _OWN, NUM_ROWS, 4, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)])
_NAMES: Final = st.one_of(st.sampled_from(["own", "other", LAYER, "", "model.lm_head"]), st.text(max_size=20))
_SLOTS: Final = st.builds(
    ValueSlot,
    st.one_of(st.sampled_from(["float32", "int64", "bool", "bfloat16", "float8_e4m3fn", "qint8"]), _NAMES),
    st.lists(_NUMBERS, max_size=5),
    _NUMBERS,
)
_REPLIES: Final = st.builds(SandboxReply, _NAMES, _NUMBERS, st.one_of(st.none(), st.binary()), st.text())
_ARGUMENTS: Final = st.one_of(_SLOTS, st.none(), st.booleans(), _NUMBERS, st.floats(), _NAMES)
_HEADS: Final = st.one_of(
    st.builds(
        ContinueReply,
        st.one_of(st.none(), st.lists(_NAMES, max_size=4)),
        st.lists(_SLOTS, max_size=3),
        st.lists(_NAMES, max_size=3),
        st.lists(_REPLIES, max_size=3),
        st.one_of(st.none(), st.lists(_NAMES, max_size=3)),
        st.booleans(),
    ),
    st.builds(
        CallRequest, _NAMES, st.lists(_ARGUMENTS, max_size=3), st.dictionaries(_NAMES, _ARGUMENTS, max_size=2)
    ),
    st.builds(Collected, st.text(), st.text()),
)
_STRUCTURES: Final = st.builds(
    lambda head, body: b"".join(packed(head, [body])),
    _HEADS,
    st.one_of(st.binary(), st.just(bytes(_CONTENT))),
)
_JSON: Final = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=8), st.binary(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """Return an honest message of which some bytes are others, missing, or there twice."""
    data = bytearray(draw(st.sampled_from(HONEST)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = at + draw(st.integers(1, 8))
        data[at:end] = draw(
            st.one_of(st.binary(max_size=8), st.just(bytes(data[at:end]) * 2), st.just(b"\xff" * 4))
        )
    return bytes(data)  # fmt: skip


def _unknown(value: Any) -> bytes:
    data = msgspec.msgpack.encode(value)
    return struct.pack("<I", len(data)) + data


_HOSTILE: Final = st.one_of(mutations(), _STRUCTURES, _JSON.map(_unknown), st.binary(max_size=64))


@given(data=_HOSTILE)
@settings(_FEW, max_examples=400)
def test_a_message_is_one_of_three_or_ends_the_process(data: bytes) -> None:
    with contextlib.suppress(SandboxEndedError):
        head, body = read_by_worker(data)
        assert type(head) in {ContinueReply, CallRequest, Collected}
        assert len(body) <= len(data)


@given(data=_HOSTILE, answers=st.sampled_from(["offer", "begin", "collect"]))
@_FEW
def test_whatever_is_answered_changes_its_own_rows_at_most(data: bytes, answers: str) -> None:
    world = World()
    with world.closing:
        world.begin(_answering(data, answers))
        world.step()
        before = torch.arange(4.0 * NUM_ROWS).view(NUM_ROWS, 4)
        after = world.dispatcher.provide(LAYER, before.clone())
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert torch.equal(after[_OWN:], before[_OWN:])
        ended, told = world.end()
        assert set(ended) <= {"own"}
        assert set(told) <= {"own"}
        wait_for(world.has_collected)
        assert world.session.error is None or isinstance(world.session.error, SandboxEndedError)
        assert world.process.is_ended == (world.session.error is not None)
        pieces, (printed, failure) = world.session.saved()
        assert len(pieces) == 1
        assert isinstance(printed, str)
        assert isinstance(failure, str)
        world.session.close()
        assert world.dispatcher.wanted == {}


def _answering(data: bytes, answers: str) -> Callable[[SandboxSide], None]:
    """Return a process that sends hostile bytes once, and is honest before and afterwards."""
    honest = wanting(LAYER, then=lambda _: packed(ContinueReply()))
    if answers == "offer":
        return wanting(LAYER, then=lambda _: [data])

    def lie(side: SandboxSide) -> None:
        if answers == "begin":
            side.receive()
            side.send([data])
            while True:
                side.receive()
                side.send(packed(ContinueReply()))
        honest(_Once(side, data))  # type: ignore[arg-type] # as much of one as is used

    return lie


class _Once:
    """A side whose answers are honest but for the one to ``Collect``."""

    def __init__(self, side: SandboxSide, data: bytes) -> None:
        self._side, self._data = side, data
        self._is_last = False

    def receive(self) -> bytes:
        data = self._side.receive()
        self._is_last = b"Collect" in data[:64]
        return data

    def send(self, parts: Any) -> None:
        self._side.send([self._data] if self._is_last else parts)


@given(
    head=st.tuples(*[st.one_of(st.integers(0, 200), st.integers(0, 2**64 - 1))] * 2),
    rest=st.binary(max_size=100),
)
@_FEW
def test_what_comes_over_the_socket_is_no_longer_than_it_may_be(head: tuple[int, int], rest: bytes) -> None:
    own, theirs = socket.socketpair()
    descriptor = Memory.create(_HALF)
    side = EngineSide(own, Memory(descriptor, _HALF))
    os.close(descriptor)
    try:
        theirs.sendall(struct.pack("<QQ", *head) + rest)
        theirs.close()
        with contextlib.suppress(SandboxEndedError, ConnectionResetError):
            for _ in range(200):
                data = side.take_answer(_HALF)
                assert data is not None
                assert len(data) <= _HALF
    finally:
        side.close()
