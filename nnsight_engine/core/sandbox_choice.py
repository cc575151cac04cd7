"""The operator's choice of how code of untrusted keys runs."""

from __future__ import annotations

from typing import Final

from nnsight_engine.core.errors import UnsupportedOptionError

PROCESS: Final = "process"
"""Each trace runs in a process of its own."""
OFF: Final = "off"
"""Code runs in the engine, like that of trusted keys."""
_REMOVED: Final = "restricted"


def check_sandbox(value: str) -> None:
    """Raise UnsupportedOptionError unless the choice is ``process`` or ``off``."""
    if value == _REMOVED:
        raise UnsupportedOptionError(
            f"the sandbox {_REMOVED!r} was removed, because only a process is a boundary: use {PROCESS!r}, "
            f"or {OFF!r} if all keys belong to people whom you trust with the engine"
        )
    if value not in {PROCESS, OFF}:
        raise UnsupportedOptionError(f"the sandbox is {PROCESS!r} or {OFF!r}, got {value!r}")


__all__ = ["OFF", "PROCESS", "check_sandbox"]
