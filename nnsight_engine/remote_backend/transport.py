"""How a trace gets to what runs it: a protocol, since it is not always HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest

Progress = Callable[[str, int, int], None]
"""Told ``"upload"`` or ``"download"``, how many bytes are through, and how many there are."""


class Transport(Protocol):
    """Carries traces to a server, and its answers back."""

    @property
    def name(self) -> str:
        """What messages call the other side."""

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        """Send a trace, and yield the frames of the answer.

        Raises:
            RemoteError: The server refuses it; a ``RemoteConnectionError`` where it cannot be reached.
        """

    def stream(self, request: TraceRequest) -> AsyncIterator[Frame]:
        """Send a trace, and yield the frames of the answer as they come; see ``run``."""

    def outline(self) -> dict[str, Any]:
        """Return what the server says of its model, see ``GET /v1/traces/outline``."""
