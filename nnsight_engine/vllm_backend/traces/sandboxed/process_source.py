"""The processes that one trace may get: an idle one of its tenant, or a new one.

Nothing here waits for a process. A trace for which none is ready waits as if its process had not answered.
"""

from __future__ import annotations

from collections.abc import Callable

from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox
from nnsight_engine.vllm_backend.traces.sandboxed.idle_processes import IdleProcesses


class ProcessSource:
    """Provides the process of one trace.

    Args:
        tenant: The tenant whose code runs in it.
        idle: The idle processes of all tenants.
        server: Provides new processes.
        on_take: Called when the trace gets a process.
    """

    def __init__(
        self, tenant: str, idle: IdleProcesses, server: ForkServer, on_take: Callable[[], None]
    ) -> None:
        self._tenant = tenant
        self._idle = idle
        self._server = server
        self._on_take = on_take

    def take(self) -> Sandbox | None:
        """Return a process; None if none is ready now."""
        sandbox = self._idle.take(self._tenant) or self._server.take()
        if sandbox is not None:
            self._on_take()
        return sandbox

    def fileno(self) -> int:
        """Return a descriptor that can be read while a new process is ready."""
        return self._server.fileno()

    def error(self) -> SandboxUnavailableError:
        """Return the error of a trace that can wait no longer."""
        return self._server.error or SandboxUnavailableError(
            "no sandbox was ready in time: send the request again"
        )


__all__ = ["ProcessSource"]
