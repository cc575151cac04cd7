"""Stopped processes that have run a trace and wait for the next one of the same tenant.

Reuse is faster, and state that a block may have left in a process can only reach blocks of its own tenant.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Final

from nnsight_engine.sandbox.forkserver import Sandbox

_MAX_PARKED: Final = 8
_MAX_USES: Final = 64
_MAX_GROWN_BYTES: Final = 128 * 2**20
_MAX_CPU_SHARE: Final = 0.1
"""Maximum share of a process's lifetime CPU seconds that may be used when it is parked for another trace."""


class IdleProcesses:
    """The idle processes of all tenants; ``cpu_s`` limits the CPU seconds of a process's life."""

    def __init__(self, cpu_s: float) -> None:
        self._max_cpu_s = _MAX_CPU_SHARE * cpu_s
        self._by_process: OrderedDict[int, tuple[str, Sandbox]] = OrderedDict()

    def put(self, tenant: str, sandbox: Sandbox) -> None:
        """Park a process whose trace has ended, or end it if it is too large or has been used too much."""
        sandbox.num_uses += 1
        try:
            sandbox.pause()
            sandbox.side.forget()  # the memory of messages is shared, and counts as the process's too
            is_reusable = (
                sandbox.num_uses < _MAX_USES
                and sandbox.grown_bytes() <= _MAX_GROWN_BYTES
                and sandbox.cpu_s() <= self._max_cpu_s
            )
        except OSError:
            is_reusable = False  # it has died
        if not is_reusable:
            sandbox.end()
            return
        self._by_process[sandbox.process] = (tenant, sandbox)
        while len(self._by_process) > _MAX_PARKED:
            self._by_process.popitem(last=False)[1][1].end()

    def take(self, tenant: str) -> Sandbox | None:
        own = [process for process, (owner, _) in self._by_process.items() if owner == tenant]
        for process in reversed(own):
            _, sandbox = self._by_process.pop(process)
            with contextlib.suppress(OSError):
                if sandbox.side.has_nothing_unread():
                    sandbox.resume()
                    return sandbox
            sandbox.end()  # it has died, or sent an unsolicited message
        return None


__all__ = ["IdleProcesses"]
