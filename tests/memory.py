"""Memory of ended engines: two processes of tests, each with one engine after another, share the machine."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Final

import psutil

_MANY_BYTES: Final = 2**30


def release_unused_memory() -> None:
    """Free what an ended engine left: reference cycles hold its weights and cache, and glibc its heap.

    It takes half a second, so that a process that holds little is left alone.
    """
    if psutil.Process().memory_info().rss < _MANY_BYTES:
        return
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
