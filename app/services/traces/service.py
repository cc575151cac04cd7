"""Running a trace, from a client's message to the frames of its answer; used by ``/v1/traces`` and jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from api_schemas.traces import TraceOutline
from app.engine.client import EngineClient
from app.engine.traces import TraceEngine, event_frame
from nnsight_engine.core.metering import UsageMeter
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest

_ENGINE_OF: Final = {"vllm": "vllm", "transformers": "local"}
"""The trace engine by the dialect of the blocks, if the client leaves the choice to the server."""

_SAVES: Final = frozenset({FrameKind.OUTPUT, FrameKind.RESULT})
"""Frames that contain saved values of blocks."""


class TraceService:
    def __init__(self, engines: Mapping[str, TraceEngine]) -> None:
        self._engines = dict(engines)

    @property
    def names(self) -> list[str]:
        return list(self._engines)

    def engine_for(self, head: TraceHead) -> TraceEngine:
        """Raise ApiError if the server has no engine for the trace."""
        able = _ENGINE_OF[head.dialect]
        name = able if head.engine == "auto" else head.engine
        if name != able or name not in self._engines:
            raise _unable(name, able)
        return self._engines[name]

    async def run(self, request: TraceRequest, job_id: str, meter: UsageMeter) -> AsyncGenerator[Frame, None]:
        """Yield the frames for the client; raises ApiError before the first one if no engine here runs it."""
        engine = self.engine_for(request.head)
        yield event_frame(JobStatus.DISPATCHED, engine=engine.name)
        frames = engine.run_trace(request, job_id)
        try:
            async for frame in frames:
                if frame.kind in _SAVES:
                    meter.captured_bytes += len(frame.data)
                yield frame
        finally:
            await frames.aclose()


async def model_outline(engine: EngineClient, engines: Sequence[str]) -> TraceOutline:
    """Return the modules as vLLM has them, and the standard points, for clients that load no model."""
    served, described = engine.served(), await engine.describe_model()
    return TraceOutline(
        model=served.names[0],
        names=list(served.names),
        fingerprint=served.fingerprint,
        engines=list(engines),
        class_name=described.outline[0][1],
        outline=described.outline,
        spec=described.spec,
    )


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
