"""The protocol between a server and its trace process, over a socket pair.

Frames are those of the client protocol; an ``EVENT`` frame contains one of the words below.

- Server: ``RUN``, with the trace as the next frame; ``CANCEL``.
- Process, at start: ``READY`` once it has loaded, or ``FAILED``.
- Process, for each trace: its events, then a ``RESULT`` or an ``ERROR``, which ends it; then ``READY`` once
  the changes of the trace are undone, or ``WORN`` if no further trace may run in the process.
- Process, while a session runs: ``TRACE`` with a trace as the next frame, or ``OUTLINE``; while a trace
  runs: ``LOCAL`` with the request to its client as the next frame. The server answers with frames, each
  preceded by the word ``ANSWER`` with the frame's ``KIND``.

Any message of the process may come from untrusted code in a block, so the server validates all of them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Final

import msgspec

from nnsight_engine.remote_backend.frames import Frame, FrameKind, FrameReader, head_of
from nnsight_engine.serialization.limits import MessageLimits

RUN: Final = "run"
CANCEL: Final = "cancel"
READY: Final = "ready"
FAILED: Final = "failed"
WORN: Final = "worn"
TRACE: Final = "trace"
OUTLINE: Final = "outline"
LOCAL: Final = "local"
ANSWER: Final = "answer"
KIND: Final = "kind"

MAX_FRAME_BYTES: Final = MessageLimits().max_bytes + 64 * 2**20
"""The largest message, plus a trace's header before it."""

BUFFER_BYTES: Final = 4 * 2**20
"""Size of the kernel's socket buffers, in each direction."""


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a process is started with.

    Attributes:
        model: The model's folder, or its name if its files are cached.
        trust_remote_code: Whether code in the model's repository may run.
        dtype: The dtype of its weights; empty for the checkpoint's.
        num_threads: Number of torch's compute threads; 0 for torch's default.
        max_result_bytes: The maximum size of the values that a trace may save.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    device: str = "cpu"
    dtype: str = ""
    num_threads: int = 0
    max_result_bytes: int = MessageLimits().max_bytes
    compresses: bool = False


class ProcessChannel:
    """The process's end of the socket, which is in blocking mode."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, frame: Frame, data: bytes = b"") -> None:
        """Send a frame, and ``data``, if any, as the next one; atomic, callable from any thread."""
        with self._lock:
            self._socket.sendall(frame.head())
            self._socket.sendall(frame.data)
            if data:
                self._socket.sendall(head_of(FrameKind.RESULT, len(data)))
                self._socket.sendall(data)

    def frames(self) -> Iterator[Frame]:
        reader = FrameReader(MAX_FRAME_BYTES)
        with contextlib.suppress(ConnectionError):
            while num_bytes := self._socket.recv_into(reader.room()):
                frame = reader.took(num_bytes)
                if frame is not None:
                    yield frame


def widen(sock: socket.socket) -> None:
    """Enlarge the kernel's socket buffers, for fewer context switches on either side."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
