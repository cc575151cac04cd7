"""What runs in a process that is begun early: it imports, waits, and becomes what it is told to be."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import select
import sys
import termios
from collections.abc import Sequence
from multiprocessing import spawn

from nnsight_engine.core.garbage_collection import uncollected

_COUNT_BYTES = 4


def main(modules: Sequence[str], pipe: int, tracker: int) -> None:
    """Import ``modules``, then go on as a process that was spawned now.

    Args:
        modules: Names of modules.
        pipe: File descriptor from which what it is for is read.
        tracker: File descriptor of the parent's resource tracker.
    """
    with uncollected():
        for name in modules:
            # What fails here fails again where it is needed, and is told there.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    vllm = sys.modules.get("vllm.utils.system_utils")
    if vllm is not None:  # while variables are where they were when it started: it cannot be named later
        vllm.set_process_title("EngineCore")
    select.select([pipe], [], [])
    waiting = fcntl.ioctl(pipe, termios.FIONREAD, bytes(_COUNT_BYTES))
    if not any(waiting):  # closed: the parent has ended, and had no use for this one
        os._exit(0)
    spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker)
