"""Imports with garbage collection switched off: nearly all objects that they create are permanent."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection within the block; afterwards, exempt all existing objects from collection.

    A fifth of the time of importing vLLM goes into collection runs over the objects that the import creates.
    """
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


__all__ = ["uncollected"]
