"""The process sandbox alone: code that nothing else holds off gets at no file, no socket, nobody else's process."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nnsight_engine.sandbox.errors import SandboxEndedError, SandboxUnavailableError
from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox
from nnsight_engine.sandbox.seccomp import machine
from tests.security.attempts import Attempt, every_attempt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process sandbox is Linux's")

_MAX_ANSWER = 2**20
_PATIENCE_S = 1.5
"""For code that does not end by itself; it is ended then."""
_TOUCHED = "touched"

NATIVE = {
    "open": "got = open(canary).read()",
    "open-libc": "import ctypes\ngot = ctypes.CDLL(None).open(canary.encode(), 1)\nassert got >= 0",
    "open-by-number": "import ctypes\ngot = ctypes.CDLL(None).syscall(2, canary.encode(), 1)\nassert got >= 0",
    "openat2": "import ctypes\ngot = ctypes.CDLL(None).syscall(437, -100, canary.encode(), b'\\0' * 24, 24)\nassert got >= 0",
    "io-uring": "import ctypes\ngot = ctypes.CDLL(None).syscall(425, 4, b'\\0' * 120)\nassert got >= 0",
    "x32": "import ctypes\ngot = ctypes.CDLL(None).syscall(0x40000002, canary.encode(), 1)\nassert got >= 0",
    "list-root": "import os\ngot = os.listdir('/')",
    "unlink": "import os\nos.unlink(canary)",
    "truncate": "import os\nos.truncate(canary, 0)",
    "rename": "import os\nos.rename(canary, canary + '2')",
    "symlink": "import os\nos.symlink(canary, 'here')",
    "chmod": "import os\nos.chmod(canary, 0o777)",
    "stat": "import os\ngot = os.stat(canary)",
    "parents-environment": "import os\ngot = open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "own-memory": "got = open('/proc/self/mem', 'rb').read(8)",
    "torch-save": "torch.save(x, canary)",
    "torch-load": "got = torch.load(canary)",
    "torch-from-file": "got = torch.from_file(canary, size=4, dtype=torch.uint8)",
    "numpy-tofile": "x.numpy().tofile(canary)",
    "numpy-memmap": "import numpy\ngot = numpy.memmap(canary, mode='r+', dtype='u1')",
    "extension": "from torch.utils.cpp_extension import load_inline\nload_inline('a', 'int a() { return 1; }', functions=['a'])",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', port))",
    "socket-pair": "import socket\nsocket.socketpair()",
    "libc-socket": "import ctypes\ngot = ctypes.CDLL(None).socket(2, 1, 0)\nassert got >= 0",
    "fork": "import os\ngot = os.fork()",
    "vfork": "import ctypes\ngot = ctypes.CDLL(None).vfork()\nassert got >= 0",
    "clone3": "import ctypes\ngot = ctypes.CDLL(None).syscall(435, b'\\0' * 88, 88)\nassert got >= 0",
    "spawn": "import subprocess\nsubprocess.run(['touch', canary])",
    "system": "import os\ngot = os.system('touch ' + canary)\nassert got == 0",
    "exec": "import os\nos.execv('/bin/sh', ['sh'])",
    "thread": "import threading\nthreading.Thread(target=print).start()",
    "kill-parent": "import os\nos.kill(os.getppid(), 9)",
    "kill-all": "import os\nos.kill(-1, 9)",
    "ptrace": "import ctypes, os\ngot = ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\nassert got >= 0",
    "process-vm": "import ctypes, os\ngot = ctypes.CDLL(None).syscall(310, os.getppid(), 0, 0, 0, 0, 0)\nassert got >= 0",
    "pidfd": "import ctypes, os\ngot = ctypes.CDLL(None).syscall(434, os.getppid(), 0)\nassert got >= 0",
    "set-user": "import os\nos.setuid(0)",
    "unshare": "import ctypes\ngot = ctypes.CDLL(None).unshare(0x10000000)\nassert got >= 0",
    "mount": "import ctypes\ngot = ctypes.CDLL(None).mount(b'none', b'/', b'tmpfs', 0, None)\nassert got >= 0",
    "bpf": "import ctypes\ngot = ctypes.CDLL(None).syscall(321, 0, 0, 0)\nassert got >= 0",
    "keys": "import ctypes\ngot = ctypes.CDLL(None).syscall(248, b'user', b'a', b'b', 1, -3)\nassert got >= 0",
    "seccomp-again": "import ctypes\ngot = ctypes.CDLL(None).syscall(317, 1, 0, 0)\nassert got >= 0",
    "raise-limits": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))",
    "memfd": "import os\nos.memfd_create('a')",
    "pipe": "import os\nos.pipe()",
    "shared-memory": "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=8)",
    "system-v": "import ctypes\ngot = ctypes.CDLL(None).shmget(0, 4096, 0o1666)\nassert got >= 0",
    "affinity": "import os\nos.sched_setaffinity(0, {0})",
    "nice": "import os\nos.nice(-5)",
    "memory": "keep = []\nwhile True:\n    keep.append(torch.ones(10_000_000))",
    "memory-python": "keep = [bytearray(2**24) for _ in range(1000)]",
    "huge-tensor": "got = torch.ones(10**11)",
}
"""Native roads, none of which the restricted compile would leave open."""

DEADLY = {
    "loop": "while True: pass",
    "loop-deaf": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "loop-inside-torch": "a = torch.ones(3000, 3000)\nwhile True: a @ a",
    "sleep": "import time\ntime.sleep(1000)",
    "deaf-to-signals": "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    "deep": "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "exit": "import os\nos._exit(0)",
    "garbage": "import os\nos.write(side._descriptor, b'\\xff' * 64)",
    "no-answer-but-a-long-one": "import os, struct\nos.write(side._descriptor, struct.pack('<QQ', 2**63, 0))",
    "more-than-there-is": "import os, struct\nos.write(side._descriptor, struct.pack('<QQ', 0, 2**40))",
    "half-an-answer": "import os, struct, time\nos.write(side._descriptor, struct.pack('<QQ', 100, 0) + b'a')\ntime.sleep(1000)",
}
"""What ends the process, or has it ended."""


@dataclass
class Canary:
    """What nobody is to touch."""

    path: Path
    listener: socket.socket
    secret: str

    def assert_untouched(self, answer: str) -> None:
        assert self.path.read_text() == self.secret
        assert self.secret not in answer
        assert sorted(self.path.parent.iterdir()) == [self.path]
        with pytest.raises(BlockingIOError):
            self.listener.accept()

    def names(self) -> dict[str, object]:
        return {"canary": str(self.path), "port": self.listener.getsockname()[1]}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    try:
        machine()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    server = ForkServer([sys.executable, "-m", "tests.security.bare"], b"", half_bytes=2**24, num_spare=2)
    server.start()
    give_up = time.monotonic() + 60
    while not server.is_ready and time.monotonic() < give_up:
        time.sleep(0.05)
    yield server
    server.close()


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Canary]:
    secret = secrets.token_hex()
    monkeypatch.setenv("NNSIGHT_ENGINE_TEST_SECRET", secret)
    folder = tmp_path / "canary"
    folder.mkdir()
    (folder / "file").write_text(secret)
    (folder / "file").chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Canary(folder / "file", listener, secret)


def _said(sandbox: Sandbox, code: str, names: dict[str, object], patience_s: float = _PATIENCE_S) -> str:
    deadline = time.monotonic() + patience_s
    sandbox.side.send([json.dumps({"code": code, "names": names}).encode()], deadline)
    return sandbox.side.receive(deadline, _MAX_ANSWER).decode()


@pytest.mark.parametrize("name", NATIVE)
def test_native_roads_are_closed(name: str, server: ForkServer, canary: Canary) -> None:
    sandbox = server.take()
    try:
        answer = _said(sandbox, NATIVE[name], canary.names(), patience_s=20)
    finally:
        sandbox.end()
    assert answer.startswith("raised "), answer
    canary.assert_untouched(answer)


@pytest.mark.parametrize("name", DEADLY)
def test_a_process_that_dies_or_does_not_answer_is_ended(
    name: str, server: ForkServer, canary: Canary
) -> None:
    sandbox = server.take()
    process = sandbox.process
    try:
        with pytest.raises((OSError, SandboxEndedError)):
            _said(sandbox, DEADLY[name], canary.names())
    finally:
        sandbox.end()
    _assert_gone(process)
    canary.assert_untouched("")


def _assert_gone(process: int) -> None:
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("the process is still there")


def _whole_corpus() -> list[list[Attempt]]:
    attempts = every_attempt()
    return [attempts[at : at + 60] for at in range(0, len(attempts), 60)]


@pytest.mark.parametrize("attempts", _whole_corpus(), ids=lambda some: some[0].name)
def test_attempts_that_the_compile_would_refuse_get_nowhere_without_it(
    attempts: list[Attempt], server: ForkServer, canary: Canary
) -> None:
    for attempt in attempts:
        sandbox = server.take()
        try:
            answer = _said(sandbox, attempt.code, canary.names(), patience_s=0.5)
        except (OSError, SandboxEndedError) as error:
            answer = str(error)
        finally:
            sandbox.end()
        canary.assert_untouched(answer)


def test_a_process_knows_nothing_of_the_one_before_it(server: ForkServer, canary: Canary) -> None:
    first, second = server.take(), server.take()
    try:
        _said(first, "import torch\ntorch.mine = 'left behind'\nimport builtins\nbuiltins.mine = 1", {}, 20)
        assert "AttributeError" in _said(second, "got = torch.mine", {}, 20)
    finally:
        first.end()
        second.end()


def test_what_is_written_to_shared_memory_after_an_answer_changes_nothing(server: ForkServer) -> None:
    sandbox = server.take()
    code = "got = 'a' * 90_000"  # more than a socket takes, so it lies in the memory
    late = """
import threading
half = side._out
answer = side.send
def send(parts):
    answer(parts)
    half[:] = bytes(len(half))
side.send = send
got = 'b' * 90_000
"""
    try:
        assert _said(sandbox, code, {}, 20).count("a") > 80_000
        answer = _said(sandbox, late, {}, 20)
        time.sleep(0.2)
        assert answer.count("b") > 80_000
        assert "\0" not in answer
    finally:
        sandbox.end()


def test_processes_have_neither_the_servers_rights_nor_its_surroundings(server: ForkServer) -> None:
    sandbox = server.take()
    try:
        told = _said(sandbox, "import os, sys\ngot = (os.getuid(), dict(os.environ), os.getgid())", {}, 20)
    finally:
        sandbox.end()
    user, environment, group = eval(told.removeprefix("got "))
    assert environment == {}
    if os.geteuid() == 0:
        assert user != 0
        assert group != 0


def test_all_end_with_their_engine(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        "import os, sys, time\n"
        "from nnsight_engine.sandbox.forkserver import ForkServer\n"
        "server = ForkServer([sys.executable, '-m', 'tests.security.bare'], b'', 2**20, 1)\n"
        "server.start()\n"
        "while not server.is_ready: time.sleep(0.05)\n"
        "print(server.take().process, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    import subprocess  # noqa: PLC0415

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    _assert_gone(int(done.stdout.split()[0]))
