"""Processes of a fork server, for tests that wait for them."""

from __future__ import annotations

import select

from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox

_LATEST_S = 60.0


def taken(server: ForkServer) -> Sandbox:
    """Return a new process, once there is one."""
    while True:
        sandbox = server.take_process()
        if sandbox is not None:
            return sandbox
        ready, _, _ = select.select([server], [], [], _LATEST_S)
        assert ready, server.error
