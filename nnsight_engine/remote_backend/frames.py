"""What a server answers a trace with: a stream of frames, each a kind, a length and its bytes.

A stream ends with ``RESULT`` or ``ERROR``; one that ends otherwise was cut off. ``docs/remote.md`` says what
each kind holds.
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
"""Of a ``LOCAL`` frame, what comes before the message."""
_SMALL_BYTES: Final = 2**20
TIER: Final = "tier"
"""Of ``OUTPUTS``, what says how vLLM ran the trace."""


class FrameKind(enum.IntEnum):
    """What a frame holds."""

    EVENT = 1
    """JSON: ``{"status": "LOG", "message": "…", "time": 1770000000.5}``, see ``api_schemas.jobs``."""
    OUTPUT = 2
    """A wire message: one streamed output of a request, with what its block has saved so far."""
    OUTPUTS = 3
    """JSON: what the trace's requests returned, by ``"<block>/<choice>"``; on vLLM also ``tier``."""
    RESULT = 4
    """A wire message: what came of each block, see ``outcomes``."""
    ERROR = 5
    """JSON: OpenAI's error object, of the server and not of a block."""
    LOCAL = 6
    """Over a job's WebSocket: a call of ``tracer.local()``, or its answer; its number and a wire message."""


class Frame(NamedTuple):
    """One frame; ``data`` is whatever holds bytes."""

    kind: FrameKind
    data: bytes | bytearray | memoryview

    def head(self) -> bytes:
        """Return what is written before the data."""
        return head_of(self.kind, len(self.data))

    def pieces(self) -> Iterator[bytes]:
        """Yield the frame in pieces, none of them large, as messages of a WebSocket are."""
        yield self.head()
        view = memoryview(self.data)
        for start in range(0, len(view), _SMALL_BYTES):
            yield bytes(view[start : start + _SMALL_BYTES])

    def json(self) -> Any:
        """Return the data as JSON.

        Raises:
            DecodeError: It is none.
        """
        try:
            return msgspec.json.decode(self.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"a {self.kind.name} frame is no JSON: {error}") from error


def head_of(kind: FrameKind, num_bytes: int) -> bytes:
    """Return what is written before the data of a frame."""
    return _HEAD.pack(kind, num_bytes)


def calling(number: int, data: bytes | bytearray | memoryview) -> Frame:
    """Return the ``LOCAL`` frame of a call, or of its answer."""
    return Frame(FrameKind.LOCAL, b"".join((_NUMBER.pack(number), data)))


def called(frame: Frame) -> tuple[int, memoryview]:
    """Return which call a ``LOCAL`` frame is of, and its message.

    Raises:
        DecodeError: It is no such frame.
    """
    if frame.kind is not FrameKind.LOCAL or len(frame.data) < _NUMBER.size:
        raise DecodeError(f"a {frame.kind.name} frame of {len(frame.data):,} bytes is no call of a client")
    (number,) = _NUMBER.unpack_from(frame.data)
    return number, memoryview(frame.data)[_NUMBER.size :]


def answer_head(head: bytes | bytearray, max_bytes: int) -> tuple[int, int] | None:
    """Return which call the ``LOCAL`` frame is of that begins so, and how many bytes of its message follow.

    None where more bytes of it are needed, ``ANSWER_HEAD_BYTES`` in all.

    Raises:
        DecodeError: It is no such frame, or has more than ``max_bytes``.
    """
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
    """Return a frame that holds ``value`` as JSON."""
    return Frame(kind, msgspec.json.encode(value))


def tier_of(frames: Sequence[Frame]) -> str | None:
    """Return how vLLM ran a trace, ``tap`` or ``eager``, see ``RemoteBackend``; None where nothing says so.

    Raises:
        DecodeError: A frame is broken.
    """
    told = [frame.json() for frame in frames if frame.kind is FrameKind.OUTPUTS]
    tier = told[0].get(TIER) if told and isinstance(told[0], dict) else None
    return tier if isinstance(tier, str) else None


class FrameReader:
    """Puts frames together from bytes as they come.

    Args:
        max_bytes: Of one frame; a longer one is an error before it is read.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start before the first frame."""
        self._max_bytes = max_bytes
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._kind: FrameKind | None = None
        self._body: bytearray | memoryview = bytearray()
        self._view = self._head
        self._num = 0

    @property
    def pending(self) -> tuple[int, int] | None:
        """How many bytes of the frame being read are here, and how many it has; None between frames."""
        return None if self._kind is None else (self._num, len(self._view))

    @property
    def is_between(self) -> bool:
        """Whether no frame is half read."""
        return self._kind is None and not self._num

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take more bytes; yields the frames that they complete.

        Raises:
            DecodeError: A frame of an unknown kind, or too long.
        """
        rest = memoryview(data)
        while rest:
            room = self.room()
            num = min(len(rest), len(room))
            room[:num] = rest[:num]
            rest = rest[num:]
            frame = self.took(num)
            if frame is not None:
                yield frame

    def room(self) -> memoryview:
        """Return where the next bytes go, for whoever can read into it; ``took`` says how many came."""
        return self._view[self._num :]

    def took(self, num_bytes: int) -> Frame | None:
        """Take note of bytes in ``room``; returns the frame that they complete.

        Raises:
            DecodeError: A frame of an unknown kind, or too long.
        """
        self._num += num_bytes
        if self._num < len(self._view):
            return None
        if self._kind is None:
            self._open_body()
            if self._view:
                return None
        assert self._kind is not None  # noqa: S101 - its body is complete
        frame = Frame(self._kind, self._body)
        self._kind, self._view, self._num = None, self._head, 0
        return frame

    def _open_body(self) -> None:
        kind, size = _HEAD.unpack(self._head)
        if kind not in set(FrameKind) or size > self._max_bytes:
            raise DecodeError(
                f"the server sent a frame of kind {kind} and {size:,} bytes; kinds are 1 to "
                f"{max(FrameKind)}, and a frame may have {self._max_bytes:,} bytes"
            )
        self._kind, self._num = FrameKind(kind), 0
        self._body = _room(size)
        self._view = memoryview(self._body)


def _room(num_bytes: int) -> bytearray | memoryview:
    """Return room for so many bytes; of a large frame, memory is taken as the bytes come."""
    if num_bytes <= _SMALL_BYTES:
        return bytearray(num_bytes)
    try:
        return np.zeros(num_bytes, np.uint8).data
    except MemoryError as error:
        raise DecodeError(f"a frame of {num_bytes:,} bytes is more than there is memory for") from error


__all__ = [
    "ANSWER_HEAD_BYTES",
    "HEAD_BYTES",
    "MEDIA_TYPE",
    "TIER",
    "Frame",
    "FrameKind",
    "FrameReader",
    "answer_head",
    "called",
    "calling",
    "head_of",
    "json_frame",
    "tier_of",
]
