"""What the engine's processes have to do with the one that starts them: its interrupts, its end, and theirs.

A terminal sends Ctrl-C to all processes of its foreground; the engine's are not to end before the server has
drained. A server that is killed can end nobody: its engine notices, and ends too. And one that hangs does not
end by itself.
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
from typing import Any

import psutil

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Have processes that this thread starts in the block, and those that they start, not notice SIGINT.

    By the mask of signals, which survives fork and exec: vLLM's processes set handlers of their own.
    """
    # Where the block would start it, Python would unblock the signal as well.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Have this process end with the one that started it, if it is one of ``multiprocessing``'s.

    vLLM has that for the workers of an engine, and not for the engine.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), name="end-with-parent", daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_engine(engine: Any) -> None:
    """End the processes of an ``AsyncLLM``, whatever they do; that it has died is then noticed as always."""
    manager = engine.engine_core.resources.engine_manager
    processes = getattr(manager, "processes", ())
    if not processes:
        logger.error("the engine's processes are not known, %s has started them: end them by hand", manager)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(process.pid)
            for one in [*top.children(recursive=True), top]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


__all__ = ["end_with_parent", "kill_engine", "uninterrupted"]
