"""Pool of sandbox processes for an engine, forked from a zygote; some are kept ready.

Starting the zygote takes seconds and a fork tens of milliseconds: both happen on a thread of their own.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nnsight_engine.sandbox import confine
from nnsight_engine.sandbox.channel import EngineSide, Memory, read_exactly
from nnsight_engine.sandbox.errors import SandboxEndedError, SandboxUnavailableError
from nnsight_engine.sandbox.zygote import FORK, NUMBER, ORDER, READY, REAP

logger = logging.getLogger(__name__)

_START_S: Final = 300.0
"""Seconds for the zygote to load its modules."""
_FORK_S: Final = 60.0
"""Long, for a busy machine: all processes end with the one that forks them, if that is given up."""
_CLOSE_S: Final = 10.0
_FOLDER: Final = "nnsight-engine-sandbox-"
_CPU_CLOCK: Final = 2
"""Turns a process id into the id of its CPU clock, see ``clock_getcpuclockid``."""
_NO_SIGNAL: Final = 0
_HELD: Final = ("RssAnon", "RssShmem", "VmSwap")
"""Lines of ``/proc/<pid>/status`` with memory that a process alone holds."""
_READY_BYTES: Final = 16 * 1024
_AGAIN_S: Final = 5.0
"""Seconds before the next attempt to start the zygote."""


class Sandbox:
    """One sandbox process, unused or assigned to a trace; ``process`` is 0 once it was ended."""

    def __init__(self, process: int, handle: int, side: EngineSide, zygote: _Zygote) -> None:
        """Own ``handle``, a descriptor (``pidfd_open(2)``) of this process, not of a later one of its id."""
        self.process = process
        self.side = side
        self.num_uses = 0
        self._handle = handle
        self._zygote = zygote
        self._first_bytes = 0

    def remember_size(self) -> None:
        """Record the size of the process before any code has run in it."""
        self._first_bytes = self._num_bytes()

    def grown_bytes(self) -> int:
        """Return the growth in bytes since ``remember_size``, with shared and swapped memory."""
        return self._num_bytes() - self._first_bytes

    def _num_bytes(self) -> int:
        """Return the memory that the process alone holds now; raises OSError if it is gone."""
        lines = Path(f"/proc/{self._running()}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return sum(int(fields[name].removesuffix("kB")) * 1024 for name in _HELD if name in fields)

    def cpu_s(self) -> float:
        return time.clock_gettime(~self._running() << 3 | _CPU_CLOCK)

    def pause(self) -> None:
        """Stop the process with SIGSTOP; like ``resume``, raises OSError if it is gone."""
        self._send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._send_signal(signal.SIGCONT)

    def _running(self) -> int:
        """Return its process id, which is still this process's; raises OSError if it is gone."""
        self._send_signal(_NO_SIGNAL)
        return self.process

    def _send_signal(self, number: int) -> None:
        if not self.process:
            raise ProcessLookupError("it has been ended")
        signal.pidfd_send_signal(self._handle, number)

    def end(self) -> None:
        """Kill the process and free what it held here; later calls do nothing."""
        if not self.process:
            return
        with contextlib.suppress(ProcessLookupError):
            self._send_signal(signal.SIGKILL)
        process, self.process = self.process, 0
        os.close(self._handle)
        self.side.close()
        self._zygote.reap(process)


class _Zygote:
    """The running clean process; ``lacks`` are the namespaces that its children do not have."""

    def __init__(
        self, command: Sequence[str], setup: bytes, half_bytes: int, *, needs_namespaces: bool
    ) -> None:
        """Start the process and wait until it has loaded everything; SandboxUnavailableError if it fails."""
        self._half_bytes = half_bytes
        self._lock = threading.Lock()
        self._num_forks_due = 0
        self._killed: deque[int] = deque()
        _remove_abandoned()
        self._folder, self._folder_lock = _claim_folder()
        ours, theirs = socket.socketpair()
        self._orders = ours
        environment = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HOME": self._folder,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [*command, str(theirs.fileno()), self._folder],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            self._release_folder()
            raise SandboxUnavailableError(f"the sandbox could not be started: {error}") from error
        finally:
            theirs.close()
        try:
            ours.settimeout(_START_S)
            ours.sendall(NUMBER.pack(len(setup)) + setup)
            self.lacks = self._exactly(self._number()).decode().split()
            ours.settimeout(_FORK_S)
        except OSError as error:
            self.close()
            raise SandboxUnavailableError(
                "the sandbox could not be started: the process that others are forked from ended, or was not "
                f"ready within {_START_S:g} s; what it printed is in this server's log ({error})"
            ) from error
        if self.lacks and needs_namespaces:
            self.close()
            raise SandboxUnavailableError(
                f"sandboxes have no {', '.join(self.lacks)} namespace here, and sandbox_needs_namespaces "
                "asks for them: allow `unshare` in the container's seccomp profile and users' namespaces "
                "in the kernel"
            )

    def fork(self) -> Sandbox:
        """Return a new process; OSError, or SandboxUnavailableError if it could not be confined."""
        ours, theirs = socket.socketpair()
        descriptor = Memory.create(self._half_bytes)
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            try:
                files = array.array("i", [theirs.fileno(), descriptor])
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, files)
                with self._lock:
                    self._orders.sendmsg([ORDER.pack(FORK, self._half_bytes)], [rights])
                    self._num_forks_due += 1
                    process = self._next_number()
                    handle = self._handle_of(process)
                undo.callback(os.close, handle)
                side = EngineSide(ours, Memory(descriptor, self._half_bytes))
                undo.pop_all()
            finally:
                self._send_killed()
                theirs.close()
                os.close(descriptor)
        sandbox = Sandbox(process, handle, side, self)
        try:
            reply = side.receive(time.monotonic() + _FORK_S, _READY_BYTES)
        except (OSError, SandboxEndedError):
            sandbox.end()
            raise
        if reply != READY:
            sandbox.end()
            raise SandboxUnavailableError(f"a sandbox could not be started: {reply.decode(errors='replace')}")
        sandbox.remember_size()
        return sandbox

    def reap(self, process: int) -> None:
        """Have the zygote reap a process that was killed; if it is forking, once that has ended."""
        self._killed.append(process)
        self._send_killed()

    def _send_killed(self) -> None:
        """Have killed processes reaped, unless a thread is forking, which does it when that has ended."""
        while self._killed and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    self._orders.sendall(ORDER.pack(REAP, self._killed.popleft()))
            finally:
                self._lock.release()

    def _next_number(self) -> int:
        """Return the process of the last order; kill those that came too late for an earlier order."""
        while True:
            process = self._number()
            self._num_forks_due -= 1
            if not self._num_forks_due:
                return process
            with contextlib.suppress(OSError):
                handle = self._handle_of(process)
                try:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
            self._orders.sendall(ORDER.pack(REAP, process))

    def _handle_of(self, process: int) -> int:
        """Return a descriptor of a child; OSError if the zygote has ended: the id may be another's by now."""
        handle = os.pidfd_open(process)
        if self._process.poll() is not None:  # until then it has not reaped the child
            os.close(handle)
            raise ProcessLookupError("the process that forks sandboxes has ended")
        return handle

    def _number(self) -> int:
        number: int = NUMBER.unpack(self._exactly(NUMBER.size))[0]
        return number

    def _exactly(self, num_bytes: int) -> bytes:
        return read_exactly(self._orders.recv, num_bytes)

    def close(self) -> None:
        self._orders.close()
        self._process.kill()
        self._process.wait()
        self._release_folder()

    def _release_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._folder_lock)


def _claim_folder() -> tuple[str, int]:
    """Create a folder and lock it, so that no other engine removes it; return its descriptor, too."""
    while True:
        folder = tempfile.mkdtemp(prefix=_FOLDER)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if Path(folder).exists():
                return folder, descriptor
            os.close(descriptor)
        # Another engine has removed it as abandoned, between its creation and the lock.


def _remove_abandoned() -> None:
    """Remove the empty folders of engines that were killed: a living engine holds the lock of its folder."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # another user's folder, or another engine removes it too
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder.rmdir()
            finally:
                os.close(descriptor)


def _check_kernel() -> None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        raise SandboxUnavailableError(
            f"the process sandbox needs Linux 5.3 or later, which has pidfd_open(2): {error}. Run the server "
            "on such a kernel, or with --sandbox off if all keys belong to people whom you trust with the "
            "engine"
        ) from error


class ForkServer:
    """Keeps ``num_spare`` sandbox processes ready, once it is started.

    ``command`` starts the zygote, with the descriptor of its socket and an empty folder appended; ``setup``
    is its first message, and ``half_bytes`` limits a message in each direction.
    """

    def __init__(
        self,
        command: Sequence[str],
        setup: bytes,
        half_bytes: int,
        num_spare: int,
        *,
        needs_namespaces: bool = False,
    ) -> None:
        """Start nothing yet; ``_num_ready`` becomes an ``eventfd``, which counts the spare processes."""
        self._command = command
        self._setup = setup
        self._half_bytes = half_bytes
        self._num_spare = num_spare
        self._needs_namespaces = needs_namespaces
        self._spare: deque[Sandbox] = deque()
        self._fork_wanted = threading.Event()
        self._closed = False
        self._error: SandboxUnavailableError | None = None
        self._zygote: _Zygote | None = None
        self._keeper: threading.Thread | None = None
        self._num_ready = -1
        self._changing = threading.Lock()

    def start(self) -> None:
        """Start the pool on its own thread, once; raises SandboxUnavailableError on unsupported machines."""
        confine.machine()
        _check_kernel()
        if self._keeper is None:
            self._num_ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
            self._keeper = threading.Thread(target=self._keep, name="nnsight-engine-sandboxes", daemon=True)
            self._keeper.start()
            weakref.finalize(self, self._fork_wanted.set)

    @property
    def is_ready(self) -> bool:
        """Whether a process is ready; SandboxUnavailableError if processes cannot be started."""
        if self._error is not None and not self._spare:
            raise self._error
        return bool(self._spare)

    def fileno(self) -> int:
        """Return a descriptor that can be read while a process is ready, to wait for one."""
        return self._num_ready

    @property
    def error(self) -> SandboxUnavailableError | None:
        """Why the last attempt to start a process failed; None if it did not."""
        return self._error

    def take_process(self) -> Sandbox | None:
        """Return an unused process; None if none is ready now, since a fork takes too long for a step."""
        try:
            with self._changing:
                if not self._spare:
                    return None
                os.eventfd_read(self._num_ready)
                return self._spare.popleft()
        finally:
            self._fork_wanted.set()  # now that it is missing

    def _add_spare(self, sandbox: Sandbox) -> None:
        with self._changing:
            self._spare.append(sandbox)
            os.eventfd_write(self._num_ready, 1)

    def _keep(self) -> None:
        """Keep spare processes ready, on the pool's thread; a zygote that fails is replaced."""
        while not self._closed:
            try:
                if self._zygote is None:
                    self._zygote = _Zygote(
                        self._command,
                        self._setup,
                        self._half_bytes,
                        needs_namespaces=self._needs_namespaces,
                    )
                    if self._zygote.lacks:
                        logger.warning("sandboxes have no %s namespace here", ", ".join(self._zygote.lacks))
                while len(self._spare) < self._num_spare and not self._closed:
                    self._add_spare(self._zygote.fork())
                self._error = None
            except SandboxUnavailableError as error:
                logger.exception("no sandbox can be started")
                self._error = error
                time.sleep(_AGAIN_S)
                continue
            except (OSError, SandboxEndedError):
                logger.exception("a sandbox could not be forked; the process that forks them is started anew")
                if self._zygote is not None:
                    self._zygote.close()
                self._zygote = None
                time.sleep(_AGAIN_S)
                continue
            self._fork_wanted.wait()
            self._fork_wanted.clear()
        while self._spare:
            self._spare.popleft().end()
        if self._zygote is not None:
            self._zygote.close()

    def close(self) -> None:
        """End all unused processes and the zygote, on the pool's thread."""
        self._closed = True
        self._fork_wanted.set()
        if self._keeper is not None:
            self._keeper.join(_CLOSE_S)
            if not self._keeper.is_alive():  # otherwise it may still write to the descriptor
                os.close(self._num_ready)
                self._keeper = None
