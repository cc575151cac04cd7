"""Frames from the bytes of responses: with progress, and of downloads that resume where they stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nnsight_engine.remote_backend.client.transport import Progress
from nnsight_engine.remote_backend.frames import Frame, FrameReader
from nnsight_engine.serialization import DecodeError

MAX_FRAME_BYTES: Final = 16 * 2**30
_SHOWN_BYTES: Final = 2**20
"""Smaller frames arrive too quickly for a progress bar."""


def frames_of(chunks: Iterator[bytes], progress: Progress | None) -> Iterator[Frame]:
    reader = FrameReader(MAX_FRAME_BYTES)
    for chunk in chunks:
        yield from reader.feed(chunk)
        _report(reader, progress)


class Download:
    """A frame stream that is downloaded over several connections."""

    def __init__(self) -> None:
        self.restart("")

    def restart(self, tag: str) -> None:
        """Start again at the first byte of the version with this entity tag."""
        self._tag = tag
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._frames: list[Frame] = []
        self.num_bytes = 0

    def headers(self) -> dict[str, str]:
        """Return the headers of a request for the rest of the version that was begun."""
        if not self.num_bytes:
            return {}
        return {"range": f"bytes={self.num_bytes}-", "if-range": self._tag}

    def take(self, chunk: bytes, progress: Progress | None) -> None:
        self.num_bytes += len(chunk)
        self._frames.extend(self._reader.feed(chunk))
        _report(self._reader, progress)

    def frames(self) -> list[Frame]:
        """Return the frames of the complete stream; raise a ``DecodeError`` if it ends within a frame."""
        if not self._reader.is_between:
            raise DecodeError("the job's result ends within a frame")
        return self._frames


def _report(reader: FrameReader, progress: Progress | None) -> None:
    pending = reader.pending
    if progress is not None and pending is not None and pending[1] > _SHOWN_BYTES:
        progress("download", *pending)


__all__ = ["MAX_FRAME_BYTES", "Download", "frames_of"]
