"""Trace messages: what went in comes out, and hostile bytes are refused before anything is made of them."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from nnsight_engine.remote_backend.messages import SentEdit, SentInvoke, TraceHead, TraceRequest
from nnsight_engine.serialization import DecodeError

INVOKE = SentInvoke(
    prompt="hi", sampling={"max_tokens": 3}, edits=[SentEdit(name="calm", digest="d", part=1)]
)
HEAD = TraceHead(model="m", dialect="vllm", groups=[{"x": 0}], invokes=[INVOKE], client="0.1.0")


def message(head: dict[str, Any] | bytes, rest: bytes = b"", version: int = 1) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<4sBxxxI", b"NNSR", version, len(text)) + text + rest


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


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"NNSR",
        b"GET / HTTP/1.1\r\n\r\n",
        message(b"{"),
        message(b"[1]"),
        message(b"\xff\xfe"),
        message(b"[" * 100_000),
        message({"model": "m"}),
        message({"model": "m", "dialect": "klingon", "parts": [0]}),
        message({"model": "m", "dialect": "vllm", "parts": []}),
        message({"model": "m", "dialect": "vllm", "parts": [3]}, b"ab"),
        message({"model": "m", "dialect": "vllm", "parts": [-1, 3]}, b"ab"),
        message({"model": 7, "dialect": "vllm", "parts": [2]}, b"ab"),
        message({"model": "m", "dialect": "vllm", "parts": [2], "invokes": [{"prompt": 3}]}, b"ab"),
        message(
            {
                "model": "m",
                "dialect": "vllm",
                "parts": [2],
                "invokes": [{"prompt": "a", "edits": [{"name": "x", "digest": "", "part": 1}]}],
            },
            b"ab",
        ),
        struct.pack("<4sBxxxI", b"NNSR", 1, 2**32 - 1) + b"{}",
    ],
)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        TraceRequest.from_bytes(data)
