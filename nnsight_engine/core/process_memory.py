"""Memory of processes that work for a server, which is to outlive them when memory runs out."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Final

_OOM_SCORE: Final = 500
"""Of 1000, on top of the share of memory that the process has: far beyond any server's."""


def end_before_server() -> None:
    """Have the kernel end this process before its server where memory runs out, if the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")


def address_space_bytes() -> int:
    """Return how much address space this process has; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        return num_pages * resource.getpagesize()
    return 0


__all__ = ["address_space_bytes", "end_before_server"]
