"""Heads and frames of bytes that are no text are refused as such."""

from __future__ import annotations

import struct

import pytest

from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import MAGIC, VERSION, TraceHead, TraceRequest
from nnsight_engine.serialization import DecodeError


@pytest.mark.parametrize("head", [b'{"model": "\x9b"}', b'{"\xff": 1}', b"[" * 100_000, b"{"])
def test_a_head_that_is_no_json_is_a_decode_error(head: bytes) -> None:
    with pytest.raises(DecodeError, match="head is broken"):
        TraceRequest.from_bytes(struct.pack("<4sBxxxI", MAGIC, VERSION, len(head)) + head)
    with pytest.raises(DecodeError, match="no JSON"):
        Frame(FrameKind.EVENT, head).json()


def message(head: str) -> bytes:
    return struct.pack("<4sBxxxI", MAGIC, VERSION, len(head)) + head.encode() + b"x"


def test_a_large_head_is_one_of_long_prompts() -> None:
    start = '{"model":"m","dialect":"vllm","parts":[1],"groups":[{"a":1},{}],"zzz":1,"wanted":["x"],'
    start += '"invokes":['
    prompt = '{"prompt":[' + "1," * 200_000 + '2],"sampling":{"n":2},"edits":[]}'
    data = message(f'{start}{prompt},{{"prompt":"{"a" * 600_000}"}}]}}')
    assert TraceRequest.is_slow(data)
    head = TraceRequest.from_bytes(data).head
    assert type(head) is TraceHead
    assert (len(head.invokes[0].prompt), head.invokes[0].prompt[-1]) == (200_001, 2)
    assert (head.invokes[0].sampling, head.invokes[1].prompt) == ({"n": 2}, "a" * 600_000)
    assert (head.groups, head.wanted) == ([{"a": 1}, {}], ["x"])
    assert not TraceRequest.is_slow(TraceRequest(head, [b"x"]).to_bytes()[:11])
    assert not TraceRequest.is_slow(message(start + '{"prompt":"a"}]}'))


@pytest.mark.parametrize(
    "more",
    [
        '"invokes":[{"prompt":"a","sampling":{"a":[' + "[1],[[]]," * 40_000 + "1]}}]",
        '"invokes":[{"prompt":"a","zzz":"' + "a" * 300_000 + '"}]',
        '"groups":[{' + ",".join(f'"{number}":1' for number in range(40_000)) + "}]",
        '"groups":[' + ",".join(['{"a":1' + " " * 2000 + "}"] * 2500) + "]",
    ],
)
def test_a_large_head_of_anything_else_is_refused_before_it_is_read(more: str) -> None:
    with pytest.raises(DecodeError, match="head is too large"):
        TraceRequest.from_bytes(message(f'{{"model":"m","dialect":"vllm","parts":[1],{more}}}'))


@pytest.mark.parametrize(
    "more",
    [
        '"invokes":[7]',
        '"invokes":[{}]',
        '"invokes":[{"prompt":["a"]}]',
        '"groups":[{"a":"b"}]',
        '"groups":{}',
    ],
)
def test_a_large_head_is_checked_as_a_small_one_is(more: str) -> None:
    padding = f'"client":"{"a" * 300_000}"'
    with pytest.raises(DecodeError, match="head is broken"):
        TraceRequest.from_bytes(message(f'{{"model":"m","dialect":"vllm","parts":[1],{padding},{more}}}'))


def test_a_head_of_countless_parts_costs_nothing() -> None:
    for field, items in (("parts", "0,"), ("groups", "{},"), ("wanted", '"a",')):
        text = f'{{"model":"m","dialect":"vllm","parts":[1],"{field}":[{items * 100_000}'.rstrip(",") + "]}"
        data = struct.pack("<4sBxxxI", b"NNSR", 1, len(text)) + text.encode() + b"x"
        with pytest.raises(DecodeError, match="4096"):
            TraceRequest.from_bytes(data)
