"""What a server and its trace process say to each other, over a socket that both inherit.

Frames as clients know them, whose ``EVENT`` holds one of the words below. The server says ``RUN`` and sends
the trace as the next frame, and may say ``CANCEL``. The process says ``READY`` once it has loaded, or
``FAILED``; then for each trace its events, and a ``RESULT`` or an ``ERROR``, which ends it, and ``READY``
again once it has undone what the trace did; ``WORN`` instead says that no other trace is to run in it. While
a session runs it may say ``TRACE`` and send one, or ``OUTLINE``, and while a trace runs ``LOCAL``, and send
what its client is to be asked: frames come in answer, each behind the word ``ANSWER`` that says its ``KIND``.

Whatever the process says may come from a block, so the server believes none of it unchecked.
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
"""Of the largest message, and of a trace's head before it."""

BUFFER_BYTES: Final = 4 * 2**20
"""What the kernel is asked to keep of frames on their way, in each direction."""


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is started with.

    Attributes:
        model: The model's folder, or its name where its files are cached.
        revision: Branch, tag or commit of the repository.
        trust_remote_code: Whether code in the model's repository may run.
        device: Where the model goes.
        dtype: Of its weights; empty for what the checkpoint says.
        num_threads: Threads that torch computes with; 0 leaves that to torch.
        max_result_bytes: What a trace may save.
        compresses: Whether results are compressed for clients that can read it.
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
    """The process's end.

    Args:
        sock: The socket, which blocks.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Talk over this socket."""
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, frame: Frame, data: bytes = b"") -> None:
        """Send a frame, whole, whichever thread calls; and ``data`` as the next one, if there is any."""
        with self._lock:
            self._socket.sendall(frame.head())
            self._socket.sendall(frame.data)
            if data:
                self._socket.sendall(head_of(FrameKind.RESULT, len(data)))
                self._socket.sendall(data)

    def frames(self) -> Iterator[Frame]:
        """Yield what comes, until the other side has gone."""
        reader = FrameReader(MAX_FRAME_BYTES)
        with contextlib.suppress(ConnectionError):
            while num_bytes := self._socket.recv_into(reader.room()):
                frame = reader.took(num_bytes)
                if frame is not None:
                    yield frame


def widen(sock: socket.socket) -> None:
    """Let the kernel keep more of what is on its way, for fewer turns on either side."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
