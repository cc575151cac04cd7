from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest

Progress = Callable[[str, int, int], None]
"""Called with ``"upload"`` or ``"download"``, the number of bytes transferred, and the total number of
bytes."""


class Transport(Protocol):
    """Sends traces to a server and returns its responses; HTTP is one implementation."""

    @property
    def name(self) -> str:
        """The server's name in error messages and logs."""

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        """Send a trace and yield the response's frames; ``RemoteError`` if refused or not reachable."""

    def stream(self, request: TraceRequest) -> AsyncIterator[Frame]:
        """Send a trace, and yield the frames of the response as they arrive; see ``run``."""

    def outline(self) -> dict[str, Any]:
        """Return the server's description of its model, see ``GET /v1/traces/outline``."""
