"""Signals and lifetimes of the engine's processes relative to the process that starts them.

Ctrl-C goes to all processes in a terminal's foreground, but the engine's must not end before the server has
drained. A server that is killed cannot stop its engine, so the engine's processes detect that.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Final

import psutil

logger = logging.getLogger(__name__)

_COORDINATOR: Final = "::DPCoordinator"
"""The end of the title of the process that counts the requests of several engines."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Make processes that this thread starts in the block, and their descendants, ignore SIGINT.

    The signal mask survives fork and exec; a handler would not do, because vLLM's processes set their own.
    """
    # If the resource tracker were started in the block, Python would unblock the signal as well.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Make this process end when its parent ends, if it was started by ``multiprocessing``.

    vLLM does this for an engine's workers, but neither for the engine's process nor for the coordinator of
    several engines, which therefore ends with them.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        arguments = (parent, _coordinators(parent))
        threading.Thread(target=_end_after, args=arguments, name="end-with-parent", daemon=True).start()


def _coordinators(parent: BaseProcess) -> list[psutil.Process]:
    """Return the parent's children that count the requests of several engines."""
    coordinators = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(parent.pid).children():
            with contextlib.suppress(psutil.Error):
                if "".join(child.cmdline()).strip().endswith(_COORDINATOR):
                    coordinators.append(child)
    return coordinators


def _end_after(parent: BaseProcess, coordinators: list[psutil.Process]) -> None:
    parent.join()
    for coordinator in coordinators:
        with contextlib.suppress(psutil.NoSuchProcess):
            coordinator.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_engine(engine: Any) -> None:
    """Kill the processes of an ``AsyncLLM``, whatever they are doing; vLLM detects their death as usual."""
    manager = engine.engine_core.resources.engine_manager
    processes = getattr(manager, "processes", ())
    if not processes:
        logger.error("the engine's processes, started by %s, are not known here: end them by hand", manager)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(process.pid)
            for member in [*top.children(recursive=True), top]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
