"""Failures of sandbox processes: to start, to fork, and after their end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from nnsight_engine.local_engine.trace_process import TraceProcess
from nnsight_engine.sandbox import forkserver
from nnsight_engine.sandbox.channel import EngineSide, Memory
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox, _Zygote
from nnsight_engine.sandbox.zygote import ORDER, REAP
from tests.waiting import wait_for

_HALF_BYTES = 2**20


def side_of(connection: socket.socket) -> EngineSide:
    descriptor = Memory.create(_HALF_BYTES)
    try:
        return EngineSide(connection, Memory(descriptor, _HALF_BYTES))
    finally:
        os.close(descriptor)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Reaper:
    """Stands for the zygote, as the parent of this test's processes."""

    def __init__(self) -> None:
        self.reaped: list[int] = []

    def reap(self, process: int) -> None:
        self.reaped.append(process)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process
        process.kill()


def state_of(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_ended_sandbox_is_sent_no_signal(sleeper: subprocess.Popen[bytes]) -> None:
    ours, theirs = socket.socketpair()
    before, reaper = open_descriptors(), Reaper()
    with theirs:
        sandbox = Sandbox(sleeper.pid, os.pidfd_open(sleeper.pid), side_of(ours), cast("Any", reaper))
        assert sandbox.cpu_s() >= 0
        sandbox.pause()
        wait_for(lambda: state_of(sleeper) == "T")
        sandbox.resume()
        wait_for(lambda: state_of(sleeper) != "T")
        sandbox.end()
        for act in (sandbox.pause, sandbox.resume, sandbox.cpu_s):
            with pytest.raises(ProcessLookupError):
                act()
        sandbox.end()
    assert sleeper.wait(20) == -signal.SIGKILL
    assert reaper.reaped == [sleeper.pid]
    assert open_descriptors() < before


def test_another_process_with_the_number_of_one_that_has_gone_is_left_alone(
    sleeper: subprocess.Popen[bytes],
) -> None:
    """As after the end of the zygote, whose children the system reaps."""
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen(["/bin/true"]) as gone:
        handle = os.pidfd_open(gone.pid)
        gone.wait()
        sandbox = Sandbox(sleeper.pid, handle, side_of(ours), cast("Any", Reaper()))
        for act in (sandbox.pause, sandbox.resume, sandbox.cpu_s, sandbox.grown_bytes):
            with pytest.raises(ProcessLookupError):
                act()
        sandbox.end()
    assert sleeper.poll() is None
    assert state_of(sleeper) != "T"


def test_sandboxes_start_beside_many_processes_of_their_user() -> None:
    """As root, whose own number of processes is not limited: the new user's is."""
    if os.geteuid() != 0:
        pytest.skip("the user does not change")
    code = (
        "import resource, sys, time\n"
        "from nnsight_engine.sandbox.forkserver import ForkServer\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))\n"
        "server = ForkServer([sys.executable, '-m', 'tests.security.bare'], b'', 2**20, 1)\n"
        "server.start()\n"
        "end = time.monotonic() + 120\n"
        "while not server.is_ready and time.monotonic() < end: time.sleep(0.05)\n"
        "server.take_process().end()\n"
        "server.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_failed_fork_is_forgotten_after_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    class ZygoteThatFailsOnce:
        lacks: tuple[str, ...] = ()

        def __init__(self, *_args: Any, **_options: Any) -> None:
            self.num_forks = 0

        def fork(self) -> Any:
            self.num_forks += 1
            if self.num_forks == 1:
                raise SandboxUnavailableError("only once")
            return type("Fake", (), {"end": lambda _self: None})()

        def close(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(forkserver, "_Zygote", ZygoteThatFailsOnce)
    monkeypatch.setattr(forkserver, "_AGAIN_S", 0.01)
    server = ForkServer([], b"", _HALF_BYTES, 1)
    server.start()
    try:
        assert select.select([server], [], [], 20)[0]
        wait_for(lambda: server.error is None)
        assert server.take_process() is not None
        wait_for(lambda: server.is_ready)
    finally:
        server.close()


def test_a_process_that_is_not_ready_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    may_fork = threading.Semaphore(0)

    class SlowZygote:
        lacks: tuple[str, ...] = ()

        def __init__(self, *_args: Any, **_options: Any) -> None:
            """Start at once."""

        def fork(self) -> Any:
            may_fork.acquire()
            return type("Fake", (), {"end": lambda _self: None})()

        def close(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(forkserver, "_Zygote", SlowZygote)
    server = ForkServer([], b"", _HALF_BYTES, 2)
    server.start()
    try:
        for _ in range(5):
            assert server.take_process() is None
            assert not select.select([server], [], [], 0)[0]
            may_fork.release()
            assert select.select([server], [], [], 20)[0]
            assert server.take_process() is not None
    finally:
        may_fork.release(10)
        server.close()


def test_a_zygote_that_cannot_be_started_leaves_nothing_open() -> None:
    before = open_descriptors()
    with pytest.raises(SandboxUnavailableError) as caught:  # its traceback refers to the sockets
        _Zygote(["/no/such/program"], b"", _HALF_BYTES, needs_namespaces=False)
    assert open_descriptors() == before, caught.value


def test_a_fork_that_fails_leaves_nothing_open() -> None:
    zygote = object.__new__(_Zygote)
    zygote._half_bytes, zygote._lock, zygote._killed = _HALF_BYTES, threading.Lock(), deque()
    zygote._orders, theirs = socket.socketpair()
    theirs.close()
    before = open_descriptors()
    with pytest.raises(OSError, match=r"pipe|reset") as caught:
        zygote.fork()
    zygote._orders.close()
    assert open_descriptors() == before - 1, caught.value


def test_the_end_of_a_process_does_not_wait_for_a_fork() -> None:
    zygote = object.__new__(_Zygote)
    zygote._lock, zygote._killed = threading.Lock(), deque()
    zygote._orders, theirs = socket.socketpair()
    with zygote._orders, theirs:
        theirs.setblocking(False)
        with zygote._lock:  # as within ``fork``
            zygote.reap(5)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
        zygote.reap(6)
        assert theirs.recv(2 * ORDER.size) == ORDER.pack(REAP, 5) + ORDER.pack(REAP, 6)


def test_a_trace_process_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> int:
        before, every = open_descriptors(), []
        for error in (FileNotFoundError, subprocess.SubprocessError):

            async def fail(*_args: Any, error: type[Exception] = error, **_options: Any) -> None:
                raise error

            monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
            with pytest.raises(error) as caught:
                await TraceProcess.start("module", {}, {})
            every.append(caught)
        return open_descriptors() - before

    assert asyncio.run(start()) == 0


def test_a_sandbox_that_has_gone_with_unread_bytes_is_not_quiet() -> None:
    ours, theirs = socket.socketpair()
    side = side_of(ours)
    assert side.has_nothing_unread()
    ours.sendall(b"unread")
    theirs.close()
    assert not side.has_nothing_unread()
    side.close()
