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
