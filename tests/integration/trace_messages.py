"""Traces as clients send them, and the answers' frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

from nnsight_engine.remote_backend.frames import Frame, FrameKind, FrameReader
from nnsight_engine.remote_backend.messages import MEDIA_TYPE, SentInvoke, TraceHead, TraceRequest
from tests.fakes.results import MODEL

HEADERS = {"content-type": MEDIA_TYPE}


def message(model: str = MODEL, blocks: bytes = b"blocks", **head: Any) -> bytes:
    """Return a trace of one request, which only a real engine would read."""
    fields: dict[str, Any] = {"dialect": "vllm", "invokes": [SentInvoke(prompt="a")], "groups": [{}], **head}
    return TraceRequest(TraceHead(model=model, **fields), [blocks]).to_bytes()


def frames_of(response: httpx.Response) -> list[Frame]:
    """Return the frames of a whole answer."""
    assert response.status_code == 200, response.text
    reader = FrameReader(2**30)
    frames = list(reader.feed(response.content))
    assert reader.is_between
    return frames


def told(frames: list[Frame]) -> Iterator[str]:
    """Yield what a trace's frames are, events by their status."""
    for frame in frames:
        yield frame.json()["status"] if frame.kind is FrameKind.EVENT else frame.kind.name
