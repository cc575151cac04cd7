"""Ways for a client's traces to get to what runs them, without a server in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from nnsight_engine.remote_backend.client.http import Progress
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceRequest


class InProcess:
    """Hands requests, as they would arrive, to a function that returns the result's bytes."""

    name = "this process"

    def __init__(self, run: Callable[[TraceRequest], bytes]) -> None:
        self._run = run

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        yield Frame(FrameKind.RESULT, self._run(TraceRequest.from_bytes(request.to_bytes())))

    def stream(self, request: TraceRequest) -> AsyncIterator[Frame]:
        raise NotImplementedError

    def outline(self) -> dict[str, Any]:
        raise NotImplementedError
