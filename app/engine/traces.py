from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Protocol

from api_schemas.jobs import JobStatus
from nnsight_engine.remote_backend.frames import Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import TraceRequest


class TraceEngine(Protocol):
    """Runs traces; ``name`` is ``vllm`` or ``local``, by which clients select it."""

    name: str

    def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        """Yield the frames of a trace; raises ApiError if it cannot be run.

        Yields an ``EVENT`` frame for each ``RUNNING`` and ``LOG`` (JSON of ``JobEvent`` without ``id`` and
        ``job``), ``OUTPUT`` frames if the request streams, then at most one ``OUTPUTS`` and exactly one
        ``RESULT``. A block's exception is part of the result, announced by an ``EVENT`` of ``ERROR`` before
        it. Closing the generator early ends the trace. The request's bytes are untrusted until an engine has
        read them; ``job_id`` is unguessable and unique to the trace.
        """


def event_frame(
    status: JobStatus, *, message: str | None = None, engine: str | None = None, job: str | None = None
) -> Frame:
    event = {"status": status, "time": time.time(), "message": message, "engine": engine, "job": job}
    return json_frame(FrameKind.EVENT, {key: value for key, value in event.items() if value is not None})
