"""Heads and frames of bytes that are no text are refused as such."""

from __future__ import annotations

import struct

import pytest

from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import MAGIC, VERSION, TraceRequest
from nnsight_engine.wire import DecodeError


@pytest.mark.parametrize("head", [b'{"model": "\x9b"}', b'{"\xff": 1}', b"[" * 100_000, b"{"])
def test_a_head_that_is_no_json_is_a_decode_error(head: bytes) -> None:
    with pytest.raises(DecodeError, match="head is broken"):
        TraceRequest.from_bytes(struct.pack("<4sBxxxI", MAGIC, VERSION, len(head)) + head)
    with pytest.raises(DecodeError, match="no JSON"):
        Frame(FrameKind.EVENT, head).json()


def test_a_head_of_countless_parts_costs_nothing() -> None:
    for field, items in (("parts", "0,"), ("groups", "{},"), ("wanted", '"a",')):
        text = f'{{"model":"m","dialect":"vllm","parts":[1],"{field}":[{items * 100_000}'.rstrip(",") + "]}"
        data = struct.pack("<4sBxxxI", b"NNSR", 1, len(text)) + text.encode() + b"x"
        with pytest.raises(DecodeError, match="4096"):
            TraceRequest.from_bytes(data)
