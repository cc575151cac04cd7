"""A server in a thread, for clients that wait: users' own code, as it is written on a laptop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from nnsight_engine.remote_backend.client.http import HttpTransport, Progress
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceRequest
from tests.waiting import wait_for


@contextlib.contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve an application on a free port; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class Recording(HttpTransport):
    """Talks to the server, and keeps the frames."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.frames: list[Frame] = []

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        for frame in super().run(request, progress):
            self.frames.append(frame)
            yield frame

    @property
    def heard(self) -> list[dict[str, Any]]:
        return [frame.json() for frame in self.frames if frame.kind is FrameKind.EVENT]

    @property
    def logs(self) -> list[str]:
        return [event["message"] for event in self.heard if event["status"] == "LOG"]


class Leaving(HttpTransport):
    """Hangs up when the block has printed something."""

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        for frame in super().run(request, progress):
            if frame.kind is FrameKind.EVENT and frame.json()["status"] == "LOG":
                raise RemoteError("left")
            yield frame
