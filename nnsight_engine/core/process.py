"""Environment, memory and garbage collection of a process.

When memory runs out, the server's child processes must be killed before the server.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final


def set_environment(variables: Mapping[str, str]) -> None:
    """Replace all environment variables by these."""
    os.environ.clear()
    os.environ.update(variables)


_OOM_SCORE: Final = 500
"""Score of 1000 that is added to the process's share of memory; it exceeds the score of any server."""


def end_before_server() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")


def address_space_bytes() -> int:
    """Return the size of this process's address space in bytes; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        return num_pages * resource.getpagesize()
    return 0


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable collection, a fifth of vLLM's import time; afterwards, exempt all existing objects from it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # At its end nanobind prints all objects that are left, of Triton for example, as leaks.
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()
