"""Traces on vLLM: one request for each invoke, whose blocks run in the engine's workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM


class VLLMTraceEngine:
    """Runs traces in vLLM's workers.

    Args:
        engine: Gives the engine; raises ApiError while there is none.
    """

    name = "vllm"

    def __init__(self, engine: Callable[[], InterventionAsyncLLM]) -> None:
        """Wait for traces."""
        self._engine = engine

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        """Run a trace; see ``TraceEngine``."""
        raise ApiError(ErrorCode.UNSUPPORTED_COMBINATION, "This server runs no traces on vLLM yet.", "engine")
        yield  # pragma: no cover
