"""The processes that one trace may get: an idle one of its tenant, or a new one; nothing here waits."""

from __future__ import annotations

from collections.abc import Callable

from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox
from nnsight_engine.vllm_backend.traces.sandboxed.idle_processes import IdleProcesses


class ProcessSource:
    def __init__(
        self, tenant: str, idle: IdleProcesses, server: ForkServer, on_take: Callable[[], None]
    ) -> None:
        self._tenant = tenant
        self._idle = idle
        self._server = server
        self._on_take = on_take

    def take(self) -> Sandbox | None:
        sandbox = self._idle.take(self._tenant) or self._server.take()
        if sandbox is not None:
            self._on_take()
        return sandbox

    def fileno(self) -> int:
        return self._server.fileno()

    def error(self) -> SandboxUnavailableError:
        return self._server.error or SandboxUnavailableError(
            "no sandbox was ready in time: send the request again"
        )


__all__ = ["ProcessSource"]
