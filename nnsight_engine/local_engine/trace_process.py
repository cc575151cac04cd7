"""The server's hand on a trace process: starts it, talks with it, and knows when it has ended.

Everything that comes from the process may come from a block, which can do there what it likes. So frames have
a size, words are looked at before they are used, and the process is watched as well as its socket, which
whatever a block started may hold open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nnsight_engine.local_engine.process_channel import ANSWER, KIND, MAX_FRAME_BYTES, RUN, widen
from nnsight_engine.remote_backend.frames import Frame, FrameKind, FrameReader, head_of, json_frame
from nnsight_engine.serialization import DecodeError

_MAX_WAITING = 256
"""Frames that are read ahead; then the process waits."""
_MAX_WAITING_BYTES = 2**22
"""What they have together; a larger one comes alone."""


class ProcessEndedError(Exception):
    """The process has ended, or said what it never says.

    Attributes:
        status: Its exit status, negative for a signal; None if it was ended for what it said.
    """

    def __init__(self, status: int | None) -> None:
        """Say how."""
        if status is None:
            how = "it broke off the connection with the server"
        elif status < 0:
            how = f"signal {signal.Signals(-status).name}"
        else:
            how = f"exit status {status}"
        super().__init__(how)
        self.status = status


class TraceProcess:
    """A process that runs traces.

    Args:
        process: The process.
        sock: Our end of its socket.
        max_bytes: Of a frame that it may send.
    """

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, max_bytes: int) -> None:
        """Begin to listen."""
        self._reader = FrameReader(max_bytes)
        self._process = process
        self._socket = sock
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue(_MAX_WAITING)
        self._num_waiting = 0
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
        """Start a process.

        Args:
            module: What it runs, ``python -m``.
            options: What it is started with, fit for JSON.
            environment: All of its environment.
            max_bytes: Of a frame that it may send.
        """
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            widen(sock)
        ours.settimeout(0)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, str(theirs.fileno()), msgspec.json.encode(options).decode(),
                pass_fds=[theirs.fileno()], env=environment, stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        return TraceProcess(process, ours, max_bytes)

    @property
    def is_quiet(self) -> bool:
        """Whether it has said nothing that was not heard; one that speaks unasked is not to be believed."""
        return self._frames.empty() and self._reader.is_between

    @property
    def has_ended(self) -> bool:
        """Whether it is over with it."""
        return self._is_over

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def say(self, word: Mapping[str, Any], chunks: Sequence[bytes | memoryview] = ()) -> None:
        """Say a word, and send a frame of these pieces behind it, if there are any.

        Raises:
            ProcessEndedError: It has ended.
        """
        loop = asyncio.get_running_loop()
        frame = json_frame(FrameKind.EVENT, word)
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
                self.kill()  # half a frame may be on its way, and nothing after it would be understood
                raise

    async def run(self, number: int, chunks: Sequence[bytes | memoryview]) -> None:
        """Have it run a trace; raises ProcessEndedError."""
        await self.say({RUN: number}, chunks)

    async def answer(self, frame: Frame) -> None:
        """Send a frame in answer to what it asked; raises ProcessEndedError."""
        await self.say({ANSWER: True, KIND: int(frame.kind)}, [memoryview(frame.data)])

    async def frame(self) -> Frame:
        """Return the next frame that it says.

        Raises:
            ProcessEndedError: It has ended, and said nothing more.
        """
        frame = await self._frames.get()
        if frame is None:
            self._frames.put_nowait(None)  # for whoever asks again
            raise await self._ended()
        self._num_waiting -= len(frame.data)
        if self._num_waiting < _MAX_WAITING_BYTES:
            self._room.set()
        return frame

    def kill(self) -> None:
        """End it, with whatever it has started."""
        if self._is_over:
            return  # its number may be somebody else's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End it and wait until it has."""
        self.kill()
        await self._process.wait()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close()

    async def _ended(self) -> ProcessEndedError:
        self.kill()
        status = await self._process.wait()
        return ProcessEndedError(None if self._broke_off else status)

    async def _read(self) -> None:
        """Put what it says into the queue, and None when it has ended."""
        gone = asyncio.create_task(self._process.wait())
        reading = asyncio.create_task(self._read_frames())
        try:
            await asyncio.wait({gone, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # What it said last is still on its way; whoever else holds the socket is not waited for.
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
        loop = asyncio.get_running_loop()
        reader = self._reader
        with contextlib.suppress(OSError, DecodeError):
            while num_bytes := await loop.sock_recv_into(self._socket, reader.room()):
                frame = reader.took(num_bytes)
                if frame is not None:
                    await self._frames.put(frame)
                    self._num_waiting += len(frame.data)
                    if self._num_waiting >= _MAX_WAITING_BYTES:
                        self._room.clear()
                        await self._room.wait()
