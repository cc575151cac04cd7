"""The local engine: a ``LanguageModel`` in a process of its own, for traces that vLLM cannot run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from api_schemas.errors import ApiError, ErrorCode
from app.engine.process_job import ProcessJob
from app.engine.request_tasks import RequestTasks
from app.engine.trace_process_pool import TraceProcesses
from app.errors import error_bytes, internal_error
from app.settings import Settings
from nnsight_engine.local_engine.process_channel import LOCAL, ProcessOptions
from nnsight_engine.local_engine.trace_process import ProcessEndedError, TraceProcess
from nnsight_engine.remote_backend.errors import LocalBlockError
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.serialization import DecodeError

logger = logging.getLogger(__name__)


class LocalTraceEngine(TraceProcesses):
    name = queue = "local"
    purpose = "the local engine"
    starts_ahead = True

    def __init__(self, options: ProcessOptions, settings: Settings, environment: Mapping[str, str]) -> None:
        super().__init__("nnsight_engine.local_engine.process", options, settings, environment)
        self._timeout_s = settings.local_block_timeout_s
        self._requests = RequestTasks()

    async def serve_request(self, child: TraceProcess, message: dict[str, Any], job: ProcessJob) -> None:
        """Have the trace's client run a part of its block, in a task of its own while the process is read."""
        if LOCAL not in message:
            await super().serve_request(child, message, job)
            return
        if not await self._requests.is_free(job):
            raise DecodeError("a trace sent a second call to its client before the first was answered")
        kind, data = await child.frame()
        if kind is not FrameKind.RESULT:
            raise DecodeError("a trace announced a call to its client and sent none")
        self._requests.start(job, self._call_client(child, data, job))

    async def ended(self, job: ProcessJob) -> None:
        await self._requests.cancel(job)

    async def _call_client(
        self, child: TraceProcess, data: bytes | bytearray | memoryview, job: ProcessJob
    ) -> None:
        with contextlib.suppress(ProcessEndedError):
            await child.answer(await self._answer(data, job))

    async def _answer(self, data: bytes | bytearray | memoryview, job: ProcessJob) -> Frame:
        if job.request.call_client is None:
            return _refusal(LocalBlockError.unreachable())
        try:
            return Frame(FrameKind.RESULT, await job.request.call_client(data))
        except TimeoutError:
            return _refusal(LocalBlockError.unanswered(self._timeout_s))
        except Exception:
            logger.exception("a call to a trace's client failed")
            return Frame(FrameKind.ERROR, error_bytes(internal_error()))


def _refusal(error: LocalBlockError) -> Frame:
    return Frame(FrameKind.ERROR, error_bytes(ApiError(ErrorCode.UNSUPPORTED_COMBINATION, str(error))))


__all__ = ["LocalTraceEngine"]
