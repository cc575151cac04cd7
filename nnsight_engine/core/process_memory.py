"""Memory of a server's child processes; when memory runs out, they must be killed before the server."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Final

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


__all__ = ["address_space_bytes", "end_before_server"]
