"""Frames as they arrive: cut anywhere, too long, of kinds that nobody knows."""

from __future__ import annotations

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
from nnsight_engine.serialization import DecodeError

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


def test_a_frame_that_should_be_json_and_is_not_says_so() -> None:
    with pytest.raises(DecodeError, match="EVENT frame is no JSON"):
        Frame(FrameKind.EVENT, b"{").json()


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
