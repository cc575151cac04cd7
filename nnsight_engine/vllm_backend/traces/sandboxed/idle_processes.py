"""Processes that have run a trace and wait, stopped, for the next one of the same tenant's.

Beginning in a process that has run something is faster than in a new one, and there need be no new one. What
a block may have left in it can reach its own tenant alone.
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
"""Of the seconds that a process may compute in its life, when another trace begins in it."""


class IdleProcesses:
    """The processes of all tenants that wait.

    Args:
        cpu_s: Seconds that one may compute in its life.
    """

    def __init__(self, cpu_s: float) -> None:
        """Start with none."""
        self._max_cpu_s = _MAX_CPU_SHARE * cpu_s
        self._by_process: OrderedDict[int, tuple[str, Sandbox]] = OrderedDict()

    def put(self, tenant: str, sandbox: Sandbox) -> None:
        """Keep a process whose trace is over, or end it: it may be too large, or too old."""
        sandbox.num_uses += 1
        try:
            if (
                sandbox.num_uses >= _MAX_USES
                or sandbox.grown_bytes() > _MAX_GROWN_BYTES
                or sandbox.cpu_s() > self._max_cpu_s
            ):
                sandbox.end()
                return
            sandbox.pause()
            sandbox.side.forget()
        except OSError:
            sandbox.end()  # it has died
            return
        self._by_process[sandbox.process] = (tenant, sandbox)
        while len(self._by_process) > _MAX_PARKED:
            self._by_process.popitem(last=False)[1][1].end()

    def take(self, tenant: str) -> Sandbox | None:
        """Return a process of a tenant's that waits, the one used last; None if there is none."""
        own = [process for process, (owner, _) in self._by_process.items() if owner == tenant]
        for process in reversed(own):
            _, sandbox = self._by_process.pop(process)
            with contextlib.suppress(OSError):
                if sandbox.side.is_quiet():
                    sandbox.resume()
                    return sandbox
            sandbox.end()  # it has died, or spoken out of turn
        return None


__all__ = ["IdleProcesses"]
