"""Traces, from a client's message to the frames that answer it: the way ``/v1/traces`` and jobs go."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.engine.traces import TraceEngine
from nnsight_engine.core.metering import METER
from nnsight_engine.remote_backend.frames import Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest

_ENGINE_OF: Final = {"vllm": "vllm", "transformers": "local"}
"""What runs a trace whose client leaves that to the server, by the modules that its blocks name."""

_SAVES: Final = frozenset({FrameKind.OUTPUT, FrameKind.RESULT})
"""Frames that bring what blocks saved."""


class TraceService:
    """Chooses what runs a trace.

    Args:
        engines: What runs traces, by name.
    """

    def __init__(self, engines: Mapping[str, TraceEngine]) -> None:
        """Know the engines."""
        self._engines = dict(engines)

    @property
    def names(self) -> list[str]:
        """What runs traces here."""
        return list(self._engines)

    def engine_for(self, head: TraceHead) -> TraceEngine:
        """Return what is to run a trace.

        Raises:
            ApiError: The server has nothing that can.
        """
        able = _ENGINE_OF[head.dialect]
        name = able if head.engine == "auto" else head.engine
        if name != able or name not in self._engines:
            raise _unable(name, able)
        return self._engines[name]

    async def run(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        """Run a trace, and yield what is to be told: events, outputs, and in the end what came of it.

        Raises:
            ApiError: The trace cannot be run; nothing was yielded where that is so from the start.
        """
        engine = self.engine_for(request.head)
        meter = METER.get()
        yield event_frame(JobStatus.DISPATCHED, engine=engine.name)
        frames = engine.run_trace(request, job_id)
        try:
            async for frame in frames:
                if meter is not None and frame.kind in _SAVES:
                    meter.captured_bytes += len(frame.data)
                yield frame
        finally:
            await frames.aclose()


def event_frame(
    status: JobStatus, *, message: str | None = None, engine: str | None = None, job: str | None = None
) -> Frame:
    """Return something that happened to a trace as a frame."""
    event = {"status": status, "time": time.time(), "message": message, "engine": engine, "job": job}
    return json_frame(FrameKind.EVENT, {key: value for key, value in event.items() if value is not None})


def _unable(name: str, able: str) -> ApiError:
    if name != able:
        whose = "LanguageModel" if able == "local" else "VLLM"
        message = (
            f"The blocks name modules of {whose}, which {able!r} runs, and ask for {name!r}: leave "
            "`engine` out, or write them against the other class."
        )
    elif name == "local":
        message = (
            "The blocks name modules of the transformers library, which this server does not keep: start it "
            "with `nnsight-engine serve --local-engine`, or write them against VLLM(...)."
        )
    else:
        message = "This server runs no traces on vLLM."
    return ApiError(ErrorCode.UNSUPPORTED_COMBINATION, message, "engine")
