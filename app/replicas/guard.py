"""A replica's server and whatever it starts, as one: it ends when its actor does, and leaves nothing.

An actor that is killed can end nothing, nor can a server that is: its engine would live on, on its GPU. So
both are of a session that this process leads. Its standard input is a pipe of the actor's, which the system
closes whatever becomes of that; then, and when the server has ended, all of the session is killed. Where this
process is killed itself, the system kills the server, with which its engine ends.
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
    """Run ``nnsight-engine`` with this process's arguments; SIGTERM is passed on."""
    servers: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for one in servers:
            one.send_signal(number)

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
