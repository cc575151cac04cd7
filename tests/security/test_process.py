"""The process sandbox alone: code that nothing else holds off gets at no file, socket or other process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from nnsight_engine.sandbox import forkserver
from nnsight_engine.sandbox.confine import missing_namespaces
from nnsight_engine.sandbox.errors import SandboxEndedError, SandboxUnavailableError
from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import IdleProcesses
from tests.security.attempts import Attempt, every_attempt
from tests.security.attempts.native import DEADLY, NATIVE
from tests.security.processes import taken
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process sandbox is Linux's")

_MAX_ANSWER = 2**20
_PATIENCE_S = 1.0
"""For code that does not end by itself; it is ended then."""
_TOUCHED = "touched"


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


@pytest.fixture
def canary(tmp_path: Path, secret: str) -> Iterator[Canary]:
    folder = tmp_path / "canary"
    folder.mkdir()
    (folder / "file").write_text(secret)
    (folder / "file").chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Canary(folder / "file", listener, secret)


def _said(sandbox: Sandbox, code: str, names: dict[str, object], patience_s: float = _PATIENCE_S) -> str:
    deadline = time.monotonic() + patience_s
    sandbox.side.send([json.dumps({"code": code, "names": names}).encode()])
    return sandbox.side.receive(deadline, _MAX_ANSWER).decode()


@pytest.mark.parametrize("name", NATIVE)
def test_native_roads_are_closed(name: str, bare: ForkServer, canary: Canary) -> None:
    sandbox = taken(bare)
    try:
        answer = _said(sandbox, NATIVE[name], canary.names(), patience_s=20)
    finally:
        sandbox.end()
    assert answer.startswith("raised "), answer
    canary.assert_untouched(answer)


@pytest.mark.parametrize("name", DEADLY)
def test_a_process_that_dies_or_does_not_answer_is_ended(name: str, bare: ForkServer, canary: Canary) -> None:
    sandbox = taken(bare)
    process = sandbox.process
    try:
        with pytest.raises((OSError, SandboxEndedError)):
            _said(sandbox, DEADLY[name], canary.names())
    finally:
        sandbox.end()
    _assert_gone(process)
    canary.assert_untouched("")


def _assert_gone(process: int) -> None:
    wait_for(lambda: not psutil.pid_exists(process))


def _portions() -> list[Any]:
    """Return the corpus in portions, of which each has some attempts of every kind."""
    attempts = every_attempt()
    first, *others = (attempts[at::12] for at in range(12))
    return [first, *(pytest.param(some, marks=pytest.mark.heavy) for some in others)]


@pytest.mark.parametrize("attempts", _portions(), ids=lambda some: some[0].name)
def test_an_attempt_gets_at_nothing_outside_of_its_process(
    attempts: list[Attempt], bare: ForkServer, canary: Canary
) -> None:
    for attempt in attempts:
        sandbox = taken(bare)
        try:
            answer = _said(sandbox, attempt.code, canary.names(), patience_s=0.5)
        except (OSError, SandboxEndedError) as error:
            answer = str(error)
        finally:
            sandbox.end()
        canary.assert_untouched(answer)


def test_the_attempts_are_real(canary: Canary) -> None:
    names = [
        "escapes-open", "escapes-open-write", "walks-class", "engine-weight", "libraries-tensor-data-ptr",
        "walks-globals-of-own", "escapes-import-socket",
    ]  # fmt: skip
    port = str(canary.names()["port"])
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.host", str(canary.path), port, *names],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert set(done.stdout.split()) == {*names} - {"escapes-open-write", "escapes-import-socket"}
    assert canary.path.read_text() == _TOUCHED
    canary.listener.accept()


def test_there_are_none_where_namespaces_are_asked_for_and_the_kernel_has_none(bare: ForkServer) -> None:
    missing = missing_namespaces()
    assert missing in ([], ["ipc", "mount", "uts"], ["user", "network", "ipc", "mount", "uts"])
    command = [sys.executable, "-m", "tests.security.bare"]
    strict = ForkServer(command, b"", half_bytes=2**24, num_spare=1, needs_namespaces=True)
    strict.start()
    with (
        pytest.raises(SandboxUnavailableError, match="sandbox_needs_namespaces") if missing else nullcontext()
    ):
        wait_for(lambda: strict.is_ready)
    strict.close()


def test_a_process_knows_nothing_of_the_one_before_it(bare: ForkServer, canary: Canary) -> None:
    first, second = taken(bare), taken(bare)
    try:
        _said(first, "import torch\ntorch.mine = 'left behind'\nimport builtins\nbuiltins.mine = 1", {}, 20)
        assert "AttributeError" in _said(second, "got = torch.mine", {}, 20)
    finally:
        first.end()
        second.end()


def test_a_process_that_died_while_it_waited_is_given_to_nobody(bare: ForkServer) -> None:
    parked = IdleProcesses(cpu_s=300)
    first, second = taken(bare), taken(bare)
    parked.park("acme", first)
    parked.park("acme", second)
    os.kill(second.process, signal.SIGKILL)
    _until_ended(second)
    assert parked.take_process("other") is None
    assert parked.take_process("acme") is first
    assert parked.take_process("acme") is None
    assert _said(first, "print", {}, patience_s=20)
    first.end()


def test_a_process_that_has_computed_for_long_takes_no_further_trace(bare: ForkServer) -> None:
    parked = IdleProcesses(cpu_s=1)
    sandbox = taken(bare)
    _said(sandbox, "import time\nwhile time.process_time() < 0.5: pass", {}, patience_s=20)
    assert sandbox.cpu_s() > 0.1
    process = sandbox.process
    parked.park("acme", sandbox)
    assert parked.take_process("acme") is None
    _assert_gone(process)


@pytest.mark.parametrize(
    ("code", "is_reusable"),
    [
        ("import torch\nkept = torch.zeros(2**26)\nimport builtins\nbuiltins.kept = kept", False),
        ("half = side._out\nhalf[:] = bytes(len(half))", True),  # the memory of messages, which is released
        ("print", True),
    ],
)
def test_a_process_that_keeps_much_memory_takes_no_further_trace(
    bare: ForkServer, code: str, is_reusable: bool
) -> None:
    parked = IdleProcesses(cpu_s=300)
    sandbox = taken(bare)
    _said(sandbox, code, {}, patience_s=20)
    parked.park("acme", sandbox)
    found = parked.take_process("acme")
    assert (found is sandbox) == is_reusable
    sandbox.end()


def test_memory_that_a_process_shares_or_has_swapped_counts_as_its_own(
    bare: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = taken(bare)
    try:
        before = sandbox.grown_bytes()
        _said(sandbox, "half = side._out\nhalf[:] = b'1' * len(half)", {}, 20)
        assert sandbox.grown_bytes() >= before + 2**24
    finally:
        sandbox.end()


def _until_ended(sandbox: Sandbox) -> None:
    wait_for(lambda: not sandbox.side.has_nothing_unread())


def test_what_is_written_to_shared_memory_after_an_answer_changes_nothing(bare: ForkServer) -> None:
    sandbox = taken(bare)
    try:
        deadline = time.monotonic() + 20
        code = "got = 'b' * 90_000"  # more than a socket takes, so it lies in the memory
        sandbox.side.send([json.dumps({"code": code, "names": {}}).encode()])
        answer = sandbox.side.receive(deadline, _MAX_ANSWER)
        assert _said(sandbox, "half = side._out\nhalf[:] = bytes(len(half))\ngot = 1", {}, 20) == "got 1"
        assert answer.count(b"b") == 90_000
    finally:
        sandbox.end()


def test_processes_have_neither_the_servers_rights_nor_its_surroundings(bare: ForkServer) -> None:
    sandbox = taken(bare)
    try:
        told = _said(sandbox, "import os, sys\ngot = (os.getuid(), dict(os.environ), os.getgid())", {}, 20)
    finally:
        sandbox.end()
    assert not list(Path(tempfile.gettempdir()).glob(f"nnsight-engine-sandbox-{os.getpid()}-*"))
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
        "print(server.take_process().process, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
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


def test_a_folder_is_not_taken_for_abandoned_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another engine of this machine, which starts at the same time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    has_ended = threading.Event()

    def sweep() -> None:
        while not has_ended.is_set():
            forkserver._remove_abandoned()

    sweeping = threading.Thread(target=sweep)
    sweeping.start()
    claimed = [forkserver._claim_folder() for _ in range(300)]
    has_ended.set()
    sweeping.join()
    for folder, held in claimed:
        assert Path(folder).is_dir()
        os.close(held)
