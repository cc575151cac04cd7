"""Program of a process that is started early: it imports modules, waits, and becomes a spawned process."""

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
    """Import ``modules``, then continue as a process that was spawned now.

    Args:
        modules: Names of modules.
        pipe: File descriptor from which the spawned process's data is read.
        tracker: File descriptor of the parent's resource tracker.
    """
    with uncollected():
        for name in modules:
            # A failing import fails again where the module is needed, and is reported there.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    vllm = sys.modules.get("vllm.utils.system_utils")
    if vllm is not None:  # before the environment changes: setting the title fails later
        vllm.set_process_title("EngineCore")
    select.select([pipe], [], [])
    waiting = fcntl.ioctl(pipe, termios.FIONREAD, bytes(_COUNT_BYTES))
    if not any(waiting):  # end of file: the parent has ended without using this process
        os._exit(0)
    spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker)
