"""Process group of a replica's server: it ends when the replica's actor does, with all child processes.

Otherwise a killed actor would leave the engine on its GPU. This process leads a session with the server in
it. Its standard input is a pipe held by the actor, which the kernel closes when the actor ends for any
reason; then, or when the server has ended, the whole session is killed. If this process is killed, the kernel
kills the server (parent-death signal).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import Final

_LIBC: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Run the server, with this process's arguments, until it or the actor ends; then end the session."""
    servers: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for process in servers:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    server = subprocess.Popen(  # noqa: S603 - ourselves
        [sys.executable, "-m", "app", *sys.argv[1:]],
        stdin=subprocess.DEVNULL,
        preexec_fn=_end_with_guard,  # noqa: PLW1509 - there is one thread as yet
    )
    servers.append(server)
    threading.Thread(target=_end_with_actor, daemon=True).start()
    status = server.wait()
    sys.stderr.write(f"the server of a replica ended with {status}\n")
    sys.stderr.flush()
    _end_all()


def _end_with_guard() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_actor() -> None:
    while os.read(0, 1):
        pass
    _end_all()


def _end_all() -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
