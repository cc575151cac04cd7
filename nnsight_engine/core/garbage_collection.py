"""Imports without collecting garbage meanwhile: nearly all that they make stays for good."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Have nothing collected within the block, and what there is then never looked at again.

    A fifth of the time that importing vLLM takes goes into looking for garbage among what it makes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


__all__ = ["uncollected"]
