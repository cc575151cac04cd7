"""The response to a trace: a stream of frames, see ``docs/remote.md``.

A complete stream ends with ``RESULT`` or ``ERROR``; any other end means that it was cut off.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from nnsight_engine.serialization import DecodeError

MEDIA_TYPE: Final = "application/vnd.nnsight.frames"
_HEAD: Final = struct.Struct("<BQ")
_NUMBER: Final = struct.Struct("<Q")
HEAD_BYTES: Final = _HEAD.size
ANSWER_HEAD_BYTES: Final = HEAD_BYTES + _NUMBER.size
"""Number of bytes before the message in a ``LOCAL`` frame."""
_SMALL_BYTES: Final = 2**20
TIER: Final = "tier"
"""Field of ``OUTPUTS`` that holds how vLLM ran the trace."""


class FrameKind(enum.IntEnum):
    EVENT = 1
    """JSON: ``{"status": "LOG", "message": "…", "time": 1770000000.5}``, see ``api_schemas.jobs``."""
    OUTPUT = 2
    """A wire message: one streamed output of a request, with the values that its block has saved so far."""
    OUTPUTS = 3
    """JSON: the results of the trace's requests, by ``"<block>/<choice>"``; on vLLM also ``tier``."""
    RESULT = 4
    """A wire message: the outcome of each block, see ``outcomes``."""
    ERROR = 5
    """JSON: OpenAI's error object, for an error of the server and not of a block."""
    LOCAL = 6
    """Over a job's WebSocket: a call of ``tracer.local()`` or its response: its number and a wire message."""


class Frame(NamedTuple):
    kind: FrameKind
    data: bytes | bytearray | memoryview

    def head(self) -> bytes:
        return head_of(self.kind, len(self.data))

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the frame in pieces that are each written at once, and copied only if they are small."""
        view = memoryview(self.data)
        if len(view) < _SMALL_BYTES:
            yield b"".join((self.head(), view))
            return
        yield self.head()
        for start in range(0, len(view), _SMALL_BYTES):
            yield view[start : start + _SMALL_BYTES]

    def json(self) -> Any:
        try:
            return msgspec.json.decode(self.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"a {self.kind.name} frame is no JSON: {error}") from error


def head_of(kind: FrameKind, num_bytes: int) -> bytes:
    return _HEAD.pack(kind, num_bytes)


def calling(number: int, data: bytes | bytearray | memoryview) -> Frame:
    return Frame(FrameKind.LOCAL, b"".join((_NUMBER.pack(number), data)))


def called(frame: Frame) -> tuple[int, memoryview]:
    """Return the call number and the message of a ``LOCAL`` frame, or raise a ``DecodeError``."""
    if frame.kind is not FrameKind.LOCAL or len(frame.data) < _NUMBER.size:
        raise DecodeError(f"a {frame.kind.name} frame of {len(frame.data):,} bytes is no call of a client")
    (number,) = _NUMBER.unpack_from(frame.data)
    return number, memoryview(frame.data)[_NUMBER.size :]


def answer_head(head: bytes | bytearray, max_bytes: int) -> tuple[int, int] | None:
    """Return call number and message size of a ``LOCAL`` frame; None until ``ANSWER_HEAD_BYTES`` are here."""
    if len(head) < HEAD_BYTES:
        return None
    kind, size = _HEAD.unpack_from(head)
    if kind != FrameKind.LOCAL or not _NUMBER.size <= size <= max_bytes:
        raise DecodeError(
            f"a frame of kind {kind} and {size:,} bytes is no answer to a call of a client; one may have "
            f"{max_bytes:,} bytes"
        )
    if len(head) < ANSWER_HEAD_BYTES:
        return None
    (number,) = _NUMBER.unpack_from(head, HEAD_BYTES)
    return number, size - _NUMBER.size


def json_frame(kind: FrameKind, value: Any) -> Frame:
    return Frame(kind, msgspec.json.encode(value))


def tier_of(frames: Sequence[Frame]) -> str | None:
    """Return how vLLM ran a trace, ``tap`` or ``eager``, see ``RemoteBackend``; None if unknown."""
    messages = [frame.json() for frame in frames if frame.kind is FrameKind.OUTPUTS]
    tier = messages[0].get(TIER) if messages and isinstance(messages[0], dict) else None
    return tier if isinstance(tier, str) else None


class FrameReader:
    """Assembles frames from bytes; one over ``max_bytes`` is refused before its data is read."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._kind: FrameKind | None = None
        self._body: bytearray | memoryview = bytearray()
        self._view = self._head
        self._num = 0

    @property
    def pending(self) -> tuple[int, int] | None:
        """Received and total number of bytes of the frame being read; None between frames."""
        return None if self._kind is None else (self._num, len(self._view))

    @property
    def is_between(self) -> bool:
        return self._kind is None and not self._num

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that the bytes complete; ``DecodeError`` for an unknown kind or a long frame."""
        rest = memoryview(data)
        while rest:
            space = self.free_space()
            num_bytes = min(len(rest), len(space))
            space[:num_bytes] = rest[:num_bytes]
            rest = rest[num_bytes:]
            frame = self.advance(num_bytes)
            if frame is not None:
                yield frame

    def free_space(self) -> memoryview:
        """Return the buffer for the next bytes; callers that read directly into it then call ``advance``."""
        return self._view[self._num :]

    def advance(self, num_bytes: int) -> Frame | None:
        """Record that bytes were written to ``free_space``; return the frame that they complete, or None."""
        self._num += num_bytes
        if self._num < len(self._view):
            return None
        if self._kind is None:
            self._start_body()
            if self._view:
                return None
        assert self._kind is not None  # noqa: S101 - its body is complete
        frame = Frame(self._kind, self._body)
        self._kind, self._view, self._num = None, self._head, 0
        return frame

    def _start_body(self) -> None:
        kind, size = _HEAD.unpack(self._head)
        if kind not in set(FrameKind) or size > self._max_bytes:
            raise DecodeError(
                f"the server sent a frame of kind {kind} and {size:,} bytes; kinds are 1 to "
                f"{max(FrameKind)}, and a frame may have {self._max_bytes:,} bytes"
            )
        self._kind, self._num = FrameKind(kind), 0
        self._body = _new_buffer(size)
        self._view = memoryview(self._body)


def _new_buffer(num_bytes: int) -> bytearray | memoryview:
    """Return a buffer; the operating system zeroes a large one lazily, as its bytes arrive."""
    if num_bytes <= _SMALL_BYTES:
        return bytearray(num_bytes)
    try:
        return np.zeros(num_bytes, np.uint8).data
    except MemoryError as error:
        raise DecodeError(f"a frame of {num_bytes:,} bytes is more than there is memory for") from error
