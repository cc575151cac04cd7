"""Messages between an engine and a sandbox process: a socket for small ones, shared memory for the rest.

The sides take turns, one message at a time, so one region of memory in each direction suffices. The engine's
side trusts nothing: lengths are checked, and it returns a copy that the sandbox can no longer change.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from nnsight_engine.sandbox.errors import SandboxEndedError

_HEAD: Final = struct.Struct("<QQ")
"""Number of message bytes in the socket, and in the shared memory."""
_MAX_INLINE: Final = 64 * 1024
"""Less than a socket buffer holds, so that the sender never blocks."""

Part = bytes | bytearray | memoryview


def read_exactly(read: Callable[[int], bytes], num_bytes: int) -> bytes:
    """Return ``num_bytes`` bytes from repeated calls of ``read``; ConnectionResetError if it ends before."""
    data = b""
    while len(data) < num_bytes:
        more = read(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("the other side is gone")
        data += more
    return data


class Memory:
    """Two halves of shared memory, one for each direction; the descriptor is mapped, but not kept open."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(descriptor, 2 * num_bytes)
        self._view = memoryview(self._map)

    @staticmethod
    def create(num_bytes: int) -> int:
        """Return a descriptor of new memory, whose size is sealed; pages are allocated on first use."""
        descriptor = os.memfd_create("nnsight-engine-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 2 * num_bytes)
        _seal(descriptor)
        return descriptor

    def half(self, number: int) -> memoryview:
        """Return one of the halves: the engine writes to 0, the sandbox to 1."""
        return self._view[number * self.num_bytes : (number + 1) * self.num_bytes]

    def forget(self) -> None:
        self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Unmap the memory; its views must have been released."""
        self._view.release()
        self._map.close()


def _seal(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _written(parts: Sequence[Part], half: memoryview) -> bytes:
    """Return the bytes for the socket: a small message with its head, or the head of one put in ``half``."""
    num_bytes = sum(map(len, parts))
    if num_bytes <= _MAX_INLINE:
        return b"".join((_HEAD.pack(num_bytes, 0), *parts))
    if num_bytes > len(half):
        raise ValueError(
            f"a message of {num_bytes:,} bytes is larger than the {len(half):,} that one may have"
        )
    offset = 0
    for part in parts:
        half[offset : offset + len(part)] = part
        offset += len(part)
    return _HEAD.pack(0, num_bytes)


class EngineSide:
    def __init__(self, connection: socket.socket, memory: Memory) -> None:
        self._socket = connection
        self._memory = memory
        self._out = memory.half(0)
        self._in = memory.half(1)
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, parts: Sequence[Part]) -> None:
        """Send without waiting; ValueError if it is too large, OSError if the other side does not read."""
        data = _written(parts, self._out)
        self._socket.settimeout(0)
        self._socket.sendall(data)

    def receive(self, deadline: float, max_bytes: int) -> bytes:
        """Return a copy of the answer; a partial one does not extend ``deadline`` (by ``time.monotonic``).

        Raises SandboxEndedError if it is invalid or too large, OSError if the other side is gone or late.
        """
        while (answer := self._complete_answer(max_bytes)) is None:
            self._wait_until(deadline)
            self._read(self._missing())
        return answer

    def take_answer(self, max_bytes: int) -> bytes | None:
        """Return a copy of the answer, None while it is incomplete; raises as ``receive`` does."""
        self._socket.settimeout(0)
        while (answer := self._complete_answer(max_bytes)) is None:
            try:
                self._read(self._missing())
            except BlockingIOError:
                return None
        return answer

    def _read(self, num_bytes: int) -> None:
        more = self._socket.recv(num_bytes)
        if not more:
            raise ConnectionResetError("the other side is gone")
        self._received += more

    def _missing(self) -> int:
        """Return how many bytes are still to be read from the socket, of the head or of the message."""
        if len(self._received) < _HEAD.size:
            return _HEAD.size - len(self._received)
        return _HEAD.size + int(_HEAD.unpack_from(self._received)[0]) - len(self._received)

    def _complete_answer(self, max_bytes: int) -> bytes | None:
        """Take the answer, None until it is whole; SandboxEndedError if it is longer than it may be."""
        if len(self._received) < _HEAD.size:
            return None
        in_socket, in_memory = _HEAD.unpack_from(self._received)
        if in_socket + in_memory > max_bytes or in_socket > _MAX_INLINE or in_memory > len(self._in):
            raise SandboxEndedError.broken("an answer was longer than any may be")
        if not in_memory and len(self._received) < _HEAD.size + in_socket:
            return None
        answer = bytes(self._in[:in_memory]) if in_memory else bytes(self._received[_HEAD.size :])
        self._received.clear()
        return answer

    def _wait_until(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other side is late")
        self._socket.settimeout(left_s)

    def forget(self) -> None:
        self._memory.forget()

    def has_nothing_unread(self) -> bool:
        """Return whether the other side is connected, and there are no unread bytes from it."""
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:  # the other side is gone, with unread bytes of ours
            return False
        return False

    def close(self) -> None:
        self._socket.close()
        self._out.release()
        self._in.release()
        self._memory.close()


class SandboxSide:
    """The sandbox's end; it uses no system calls but ``read`` and ``write``."""

    def __init__(self, descriptor: int, memory: Memory) -> None:
        self._descriptor = descriptor
        self._out = memory.half(1)
        self._in = memory.half(0)

    def send(self, parts: Sequence[Part]) -> None:
        data = memoryview(_written(parts, self._out))
        while data:
            data = data[os.write(self._descriptor, data) :]

    def receive(self) -> bytes:
        """Wait for the next message; raises ConnectionResetError if the engine is gone."""
        in_socket, in_memory = _HEAD.unpack(self._exactly(_HEAD.size))
        return bytes(self._in[:in_memory]) if in_memory else self._exactly(in_socket)

    def _exactly(self, num_bytes: int) -> bytes:
        return read_exactly(partial(os.read, self._descriptor), num_bytes)
