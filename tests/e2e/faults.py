"""What breaks a server from outside, and what of a server can be counted before and after."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

_SHM: Final = Path("/dev/shm")
_PIECE_BYTES: Final = 2**16


class Proxy:
    """TCP on this machine, passed on to a Unix socket until it is cut."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open: set[socket.socket] = set()
        self._listener = self._listen(0)
        self.port = self._listener.getsockname()[1]

    def cut(self) -> None:
        # A thread that waits in ``accept`` holds the socket until it is shut down.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        """Take connections again, at the same port."""
        self._listener = self._listen(self.port)

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[bool]:
    """Have a folder be a disk of its own; yields whether it is, which takes root's rights."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=0700", "tmpfs", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        ballast.unlink()


def engine_processes(server: int) -> list[psutil.Process]:
    """Return the engine's processes of a server; those below them belong to them."""
    found = psutil.Process(server).children()
    return [one for one in found if "resource_tracker" not in " ".join(one.cmdline())]


def sandbox_processes(server: int) -> list[psutil.Process]:
    """Return the process that a server's sandboxes are forked from, and all of those."""
    found = [one for engine in engine_processes(server) for one in engine.children(recursive=True)]
    return [one for one in found if "sandbox" in " ".join(one.cmdline())]


def hang(*processes: psutil.Process) -> None:
    """Have processes do nothing any more, and not end."""
    for one in processes:
        one.suspend()


def kill(*processes: psutil.Process) -> None:
    """End processes as a lack of memory does."""
    for one in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)


def held(server: int, temporary: Path, shared: Shared) -> dict[str, int]:
    """Count what a server holds: processes, descriptors, shared memory, temporary files."""
    process = psutil.Process(server)
    below = process.children(recursive=True)
    shared.look()
    return {
        "processes": sum("resource_tracker" not in " ".join(one.cmdline()) for one in below),
        "descriptors": process.num_fds(),
        "shared memory": len(shared.there),
        "temporary files": len(files_in(temporary)),
    }


class Shared:
    """What a server and its processes have in shared memory, or had and have left there.

    What those of other servers on this machine have does not count.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._seen: set[Path] = set()

    def look(self) -> None:
        """Take note of what is theirs now: mapped, open, or named after one of them."""
        top = psutil.Process(self._server)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                maps = Path(f"/proc/{process.pid}/maps").read_text().split("\n")
                mapped = {Path(line[line.index("/") :]) for line in maps if f" {_SHM}/" in line}
                opened = {Path(os.readlink(one)) for one in Path(f"/proc/{process.pid}/fd").iterdir()}
                named = set(_SHM.glob(f"nnsight-engine-{os.getuid()}/{process.pid}-*"))
                self._seen |= mapped | {path for path in opened if _SHM in path.parents} | named

    @property
    def there(self) -> list[Path]:
        """Of all that was ever theirs, what is there; but for the names of locks, and locks that all share.

        Of an engine that was killed there is the name of a lock, until the server ends.
        """
        kept = (path for path in self._seen if path.exists() and path.name != ".lock")
        return sorted(path for path in kept if not path.name.startswith("sem."))


def files_in(temporary: Path) -> list[str]:
    """Name what a server has in its temporary folder, but for places that servers of one user share.

    Of an engine that was killed vLLM leaves a file of some bytes by which its processes found each other.
    """
    shared = {".lock", f"nnsight-engine-{os.getuid()}"}
    found = (path for path in temporary.rglob("*") if path.name not in shared)
    return sorted(str(path) for path in found if not path.name.startswith("vllm_dist_"))
