"""Trace messages and frames: what went in comes out, and hostile bytes are refused before they are read."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from nnsight_engine.remote_backend.frames import (
    HEAD_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    json_frame,
    tier_of,
)
from nnsight_engine.remote_backend.messages import SentEdit, SentInvoke, TraceHead, TraceRequest
from nnsight_engine.serialization import DecodeError

INVOKE = SentInvoke(
    prompt="hi", sampling={"max_tokens": 3}, edits=[SentEdit(name="calm", digest="d", part=1)]
)
HEAD = TraceHead(model="m", dialect="vllm", groups=[{"x": 0}], invokes=[INVOKE], client="0.1.0")
EDITED = {"prompt": "a", "edits": [{"name": "x", "digest": "", "part": 1}]}
PADDING = f'"client":"{"a" * 300_000}",'


def message(head: dict[str, Any] | str | bytes, rest: bytes = b"", version: int = 1) -> bytes:
    text = json.dumps(head) if isinstance(head, dict) else head
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<4sBxxxI", b"NNSR", version, len(data)) + data + rest


def of_vllm(more: str) -> bytes:
    """Return a message whose head has further fields, as JSON."""
    return message(f'{{"model":"m","dialect":"vllm","parts":[1],{more}}}', b"x")


def test_a_message_comes_out_as_it_went_in() -> None:
    request = TraceRequest.from_bytes(TraceRequest(HEAD, [b"blocks", b"edit"]).to_bytes())
    assert request.head.invokes == [INVOKE]
    assert request.head.python.count(".") == 2
    assert [bytes(part) for part in request.parts] == [b"blocks", b"edit"]
    assert bytes(request.blocks) == b"blocks"


def test_fields_of_newer_clients_are_ignored() -> None:
    plain = {"model": "m", "dialect": "vllm", "parts": [2], "tomorrow": {"a": [1]}, "python": "3.14.0"}
    assert TraceRequest.from_bytes(message(plain, b"ab")).head.python == "3.14.0"


def test_another_version_is_reported_with_the_older_side() -> None:
    with pytest.raises(DecodeError, match="the server is older"):
        TraceRequest.from_bytes(message({}, version=2))
    with pytest.raises(DecodeError, match="the client is older"):
        TraceRequest.from_bytes(message({}, version=0))


def test_a_large_head_is_one_of_long_prompts() -> None:
    start = '{"model":"m","dialect":"vllm","parts":[1],"groups":[{"a":1},{}],"zzz":1,"wanted":["x"],'
    start += '"invokes":['
    prompt = '{"prompt":[' + "1," * 200_000 + '2],"sampling":{"n":2},"edits":[]}'
    data = message(f'{start}{prompt},{{"prompt":"{"a" * 600_000}"}}]}}', b"x")
    assert TraceRequest.is_slow(data)
    head = TraceRequest.from_bytes(data).head
    assert type(head) is TraceHead
    assert (len(head.invokes[0].prompt), head.invokes[0].prompt[-1]) == (200_001, 2)
    assert (head.invokes[0].sampling, head.invokes[1].prompt) == ({"n": 2}, "a" * 600_000)
    assert (head.groups, head.wanted) == ([{"a": 1}, {}], ["x"])
    assert not TraceRequest.is_slow(TraceRequest(head, [b"x"]).to_bytes()[:11])
    assert not TraceRequest.is_slow(message(start + '{"prompt":"a"}]}', b"x"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", None),
        (b"NNSR", None),
        (b"GET / HTTP/1.1\r\n\r\n", None),
        *((message(head, b"x"), "head is broken") for head in (b"{", b"[1]", b"\xff\xfe", b'{"\xff": 1}')),
        (message(b"[" * 100_000), "head is broken"),
        (message({"model": "m"}), None),
        (message({"model": "m", "dialect": "klingon", "parts": [0]}), None),
        (message({"model": "m", "dialect": "vllm", "parts": []}), None),
        (message({"model": "m", "dialect": "vllm", "parts": [3]}, b"ab"), None),
        (message({"model": "m", "dialect": "vllm", "parts": [-1, 3]}, b"ab"), None),
        (message({"model": 7, "dialect": "vllm", "parts": [2]}, b"ab"), None),
        (message({"model": "m", "dialect": "vllm", "parts": [2], "invokes": [{"prompt": 3}]}, b"ab"), None),
        (message({"model": "m", "dialect": "vllm", "parts": [2], "invokes": [EDITED]}, b"ab"), None),
        (struct.pack("<4sBxxxI", b"NNSR", 1, 2**32 - 1) + b"{}", None),
        # A large head is checked as a small one is.
        (of_vllm(f'{PADDING}"invokes":[7]'), "head is broken"),
        (of_vllm(f'{PADDING}"invokes":[{{}}]'), "head is broken"),
        (of_vllm(f'{PADDING}"invokes":[{{"prompt":["a"]}}]'), "head is broken"),
        (of_vllm(f'{PADDING}"groups":[{{"a":"b"}}]'), "head is broken"),
        (of_vllm(f'{PADDING}"groups":{{}}'), "head is broken"),
        # One that is large by anything else than prompts is refused before it is read.
        (
            of_vllm('"invokes":[{"prompt":"a","sampling":{"a":[' + "[1],[[]]," * 40_000 + "1]}}]"),
            "head is too large",
        ),
        (of_vllm('"invokes":[{"prompt":"a","zzz":"' + "a" * 300_000 + '"}]'), "head is too large"),
        (
            of_vllm('"groups":[{' + ",".join(f'"{number}":1' for number in range(40_000)) + "}]"),
            "head is too large",
        ),
        (
            of_vllm('"groups":[' + ",".join(['{"a":1' + " " * 2000 + "}"] * 2500) + "]"),
            "head is too large",
        ),
        # Countless parts cost nothing.
        *(
            (of_vllm(f'"{field}":[{(items * 100_000).rstrip(",")}]'), "4096")
            for field, items in (("parts", "0,"), ("groups", "{},"), ("wanted", '"a",'))
        ),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, bytes) else value,
)
def test_hostile_bytes_are_refused(data: bytes, said: str | None) -> None:
    with pytest.raises(DecodeError, match=said):
        TraceRequest.from_bytes(data)


FRAMES = [
    json_frame(FrameKind.EVENT, {"status": "RUNNING"}),
    Frame(FrameKind.OUTPUT, b""),
    Frame(FrameKind.RESULT, bytes(range(256)) * 20),
]
STREAM = b"".join(frame.head() + bytes(frame.data) for frame in FRAMES)


@pytest.mark.parametrize("size", [1, 2, HEAD_BYTES, HEAD_BYTES + 1, 100, len(STREAM)])
def test_frames_come_out_whole_wherever_the_stream_is_cut(size: int) -> None:
    reader = FrameReader(10_000)
    found = []
    for start in range(0, len(STREAM), size):
        found += list(reader.feed(STREAM[start : start + size]))
    assert [(frame.kind, bytes(frame.data)) for frame in found] == [
        (frame.kind, bytes(frame.data)) for frame in FRAMES
    ]
    assert reader.is_between
    assert found[0].json() == {"status": "RUNNING"}


def test_how_much_of_a_frame_is_here_is_known() -> None:
    reader = FrameReader(10_000)
    before = reader.pending
    assert list(reader.feed(FRAMES[2].head() + b"abc")) == []
    assert (before, reader.pending, reader.is_between) == (None, (3, 5120), False)


@pytest.mark.parametrize(("kind", "size"), [(0, 1), (99, 1), (FrameKind.RESULT, 10_001), (4, 2**63)])
def test_a_frame_that_cannot_be_is_refused_before_it_is_read(kind: int, size: int) -> None:
    with pytest.raises(DecodeError, match="kind"):
        list(FrameReader(10_000).feed(struct.pack("<BQ", kind, size)))


@pytest.mark.parametrize("data", [b'{"model": "\x9b"}', b'{"\xff": 1}', b"[" * 100_000, b"{"])
def test_a_frame_that_should_be_json_and_is_not_says_so(data: bytes) -> None:
    with pytest.raises(DecodeError, match="EVENT frame is no JSON"):
        Frame(FrameKind.EVENT, data).json()


@pytest.mark.parametrize(
    ("outputs", "tier"),
    [({"0/0": {}, "tier": "eager"}, "eager"), ({"0/0": {}}, None), ([1], None), ({"tier": 5}, None)],
)
def test_how_vllm_ran_a_trace_is_read_from_what_may_be_anything(outputs: Any, tier: str | None) -> None:
    result = Frame(FrameKind.RESULT, b"")
    assert tier_of([json_frame(FrameKind.OUTPUTS, outputs), result]) == tier
    assert tier_of([result]) is None
    with pytest.raises(DecodeError):
        tier_of([Frame(FrameKind.OUTPUTS, b"{"), result])
