"""Memory of ended engines: two processes of tests, each with one engine after another, share the machine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Final

import psutil
import pytest

_GROWN_BYTES: Final = 2**28


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Spare garbage collections all that there is; only newer objects are looked through within the block.

    vLLM freezes an engine's objects, and unfreezes all of the process when one ends. Starting an engine and
    ending it collects seven times, which took longer than all else of it.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield


class ProcessMemory:
    """The memory of this process, and its size after the last release."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._num_bytes = 0

    def release(self) -> None:
        """Free what ended engines left: reference cycles hold their weights and caches, and glibc its heap.

        It takes half a second, so that nothing is done where little was added since the last time.
        """
        if self._process.memory_info().rss < self._num_bytes + _GROWN_BYTES:
            return
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        self._num_bytes = self._process.memory_info().rss
