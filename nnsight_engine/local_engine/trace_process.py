"""The server's handle of a trace process, and their protocol over a socket pair.

Frames are those of the client protocol; an ``EVENT`` frame contains one of the words below. Any message
may come from untrusted code in a block: frames are limited, words validated. The process is watched as
well as its socket, which a process that a block has started may hold open.

- Server: ``RUN``, with the trace as the next frame; ``CANCEL``.
- Process, at start: ``READY`` once it has loaded, or ``FAILED``.
- Process, for each trace: its events, then a ``RESULT`` or an ``ERROR``, which ends it; then ``READY`` once
  the changes of the trace are undone, or ``WORN`` if no further trace may run in the process.
- Process, while a session runs: ``TRACE`` with a trace as the next frame, or ``OUTLINE``; while a trace
  runs: ``LOCAL`` with the request to its client as the next frame. The server answers with frames, each
  preceded by the word ``ANSWER`` with the frame's ``KIND``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from nnsight_engine.remote_backend.frames import Frame, FrameKind, FrameReader, head_of, json_frame
from nnsight_engine.serialization import DecodeError
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

_BUFFER_BYTES: Final = 4 * 2**20
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


_MAX_WAITING = 256
"""Maximum number of frames that are read ahead; beyond it the process is blocked."""
_MAX_WAITING_BYTES = 2**22
"""Their maximum total size in bytes; a larger frame is read alone."""


class ProcessEndedError(Exception):
    """The process has ended, or has broken the protocol.

    ``status`` is its exit status, negative for a signal; None if it was killed because it closed the
    connection.
    """

    def __init__(self, status: int | None) -> None:
        """Describe the end by the exit status; None: the process was killed, as it closed the connection."""
        if status is None:
            how = "it closed the connection to the server"
        elif status < 0:
            how = f"signal {signal.Signals(-status).name}"
        else:
            how = f"exit status {status}"
        super().__init__(how)
        self.status = status


class TraceProcess:
    """A process that runs traces. Not thread-safe: use it on one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, max_bytes: int) -> None:
        """Take over a running process, and begin to read its frames of at most ``max_bytes``."""
        self._reader = FrameReader(max_bytes)
        self._process = process
        self._socket = sock
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue(_MAX_WAITING)
        self._num_waiting_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._sending = asyncio.Lock()
        self._reading = asyncio.create_task(self._read(), name="trace-process")
        self._broke_off = False
        self._is_over = False

    @staticmethod
    async def start(
        module: str, options: Any, environment: Mapping[str, str], *, max_bytes: int = MAX_FRAME_BYTES
    ) -> TraceProcess:
        """Start ``python -m module`` with options for JSON and an ``environment`` that is complete."""
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):  # fewer context switches on either side
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        ours.settimeout(0)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", module, str(theirs.fileno()), msgspec.json.encode(options).decode(),
                    pass_fds=[theirs.fileno()], env=environment, stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        return TraceProcess(process, ours, max_bytes)

    @property
    def has_nothing_unread(self) -> bool:
        """Whether all of its messages were read; an idle process that sends messages is not to be trusted."""
        return self._frames.empty() and self._reader.is_between

    @property
    def has_ended(self) -> bool:
        return self._is_over

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send(self, message: Mapping[str, Any], chunks: Sequence[bytes | memoryview] = ()) -> None:
        """Send a message, and ``chunks``, if any, as the next frame; ProcessEndedError if it has ended."""
        loop = asyncio.get_running_loop()
        frame = json_frame(FrameKind.EVENT, message)
        pieces: list[Any] = [frame.head() + frame.data]
        if chunks:
            pieces += [head_of(FrameKind.RESULT, sum(map(len, chunks))), *chunks]
        async with self._sending:
            try:
                for piece in pieces:
                    await loop.sock_sendall(self._socket, piece)
            except OSError as error:
                raise await self._ended() from error
            except BaseException:
                self.kill()  # after a partial frame, the process could parse nothing
                raise

    async def run(self, number: int, chunks: Sequence[bytes | memoryview]) -> None:
        await self.send({RUN: number}, chunks)

    async def answer(self, frame: Frame) -> None:
        await self.send({ANSWER: True, KIND: int(frame.kind)}, [memoryview(frame.data)])

    async def frame(self) -> Frame:
        """Wait for the next frame; raises ProcessEndedError if the process has ended and no frame is left."""
        frame = await self._frames.get()
        if frame is None:
            self._frames.put_nowait(None)  # for the next call
            raise await self._ended()
        self._num_waiting_bytes -= len(frame.data)
        if self._num_waiting_bytes < _MAX_WAITING_BYTES:
            self._room.set()
        return frame

    def kill(self) -> None:
        """Kill the process, with those that blocks have started; safe to call again."""
        if self._is_over:
            return  # its process id may have been reused
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the process, wait for its end, and close the socket."""
        self.kill()
        await self._process.wait()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close()

    async def _ended(self) -> ProcessEndedError:
        """Kill what is left of the process; return the error that tells how it has ended."""
        self.kill()
        status = await self._process.wait()
        return ProcessEndedError(None if self._broke_off else status)

    async def _read(self) -> None:
        """Read frames until the process or the connection has ended, kill it, and put None after them."""
        gone = asyncio.create_task(self._process.wait())
        reading = asyncio.create_task(self._read_frames())
        try:
            await asyncio.wait({gone, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # Its last frames may still be in the socket; do not wait for other holders of the socket.
                await asyncio.wait({reading}, timeout=1)
            elif not gone.done():
                await asyncio.wait({gone}, timeout=1)
                self._broke_off = not gone.done()
        finally:
            for task in (gone, reading):
                task.cancel()
            await asyncio.gather(gone, reading, return_exceptions=True)
            self.kill()
            await self._process.wait()
            self._is_over = True
            await self._frames.put(None)

    async def _read_frames(self) -> None:
        """Put frames into the queue; wait while those in it have too many bytes."""
        loop = asyncio.get_running_loop()
        reader = self._reader
        with contextlib.suppress(OSError, DecodeError):
            while num_bytes := await loop.sock_recv_into(self._socket, reader.free_space()):
                frame = reader.advance(num_bytes)
                if frame is not None:
                    await self._frames.put(frame)
                    self._num_waiting_bytes += len(frame.data)
                    if self._num_waiting_bytes >= _MAX_WAITING_BYTES:
                        self._room.clear()
                        await self._room.wait()
