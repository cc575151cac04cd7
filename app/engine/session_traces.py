"""Sessions on vLLM: plain code in a process without a model, whose traces vLLM runs.

The code around a session's traces must not run in this process nor in vLLM's workers. The process sends each
trace here, and what vLLM answers goes back; what the traces' blocks print goes to the session's client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.engine.trace_processes import Job, TraceProcesses
from app.engine.traces import TraceEngine
from app.errors import error_bytes, internal_error
from app.settings import Settings
from nnsight_engine.local_engine.child import Child, ProcessEndedError
from nnsight_engine.local_engine.link import OUTLINE, TRACE, ProcessOptions
from nnsight_engine.remote_backend.frames import Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.wire import DecodeError

logger = logging.getLogger(__name__)

Outline = Callable[[], Awaitable[dict[str, Any]]]
_PASSED_ON = frozenset({FrameKind.OUTPUTS, FrameKind.RESULT})


class SessionTraces(TraceProcesses):
    """Runs sessions on another engine, which runs their traces.

    Args:
        engine: Runs the traces.
        outline: Gives what clients are told of the model.
        options: Of the processes.
        settings: The server's.
        environment: Of the processes.
    """

    name = "vllm"
    queue = "sessions"
    purpose = "a session's process"
    are_engines = False

    def __init__(
        self,
        engine: TraceEngine,
        outline: Outline,
        options: ProcessOptions,
        settings: Settings,
        environment: Mapping[str, str],
    ) -> None:
        """Start nothing yet."""
        super().__init__(
            "nnsight_engine.local_engine.session_process",
            options,
            settings,
            environment,
            num_processes=settings.session_processes,
        )
        self._engine = engine
        self._outline = outline
        self._asking: dict[Job, asyncio.Task[None]] = {}

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        """Run a session here, a trace on the engine; see ``TraceEngine``."""
        run = super().run_trace if request.head.kind == "session" else self._engine.run_trace
        async with contextlib.aclosing(run(request, job_id)) as frames:
            async for frame in frames:
                yield frame

    async def asked(self, child: Child, word: dict[str, Any], job: Job) -> None:
        """Do what a session asks for, beside listening to it: run a trace, or describe the model.

        Raises:
            DecodeError: It is not known here, or the last is not done.
        """
        if job in self._asking and not self._asking[job].done():
            raise DecodeError("a session asks for something while it waits for something else")
        if TRACE in word:
            kind, data = await child.frame()
            if kind is not FrameKind.RESULT:
                raise DecodeError("a session sends no trace where it says so")
            # Listening is no request's; what the trace uses, its tier and its spans are the job's.
            tracing = self._trace(child, data, job)
            self._asking[job] = asyncio.create_task(tracing, context=job.context.copy())
        elif OUTLINE in word:
            self._asking[job] = asyncio.create_task(self._describe(child))
        else:
            await super().asked(child, word, job)

    async def ended(self, job: Job) -> None:
        """End the trace of a session that has ended."""
        asking = self._asking.pop(job, None)
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _trace(self, child: Child, data: bytes | bytearray | memoryview, job: Job) -> None:
        """Run a session's trace, and answer with what came of it."""
        with contextlib.suppress(ProcessEndedError):
            try:
                request = await asyncio.to_thread(TraceRequest.from_bytes, data)  # whoever wrote it
                _check(request)
                request.tenant = job.request.tenant
                frames = self._engine.run_trace(request, f"session-{secrets.token_hex(16)}")
                async with contextlib.aclosing(frames):
                    async for frame in frames:
                        await self._pass_to(child, frame, job)
            except DecodeError as error:
                await child.answer(_refusal(ApiError(ErrorCode.INVALID_TRACE, str(error))))
            except ApiError as error:
                await child.answer(_refusal(error))
            except ProcessEndedError:
                raise
            except Exception:
                logger.exception("a session's trace failed")
                await child.answer(_refusal(internal_error()))

    async def _pass_to(self, child: Child, frame: Frame, job: Job) -> None:
        if frame.kind in _PASSED_ON:
            await child.answer(frame)
        elif frame.kind is FrameKind.EVENT and (event := frame.json())["status"] == JobStatus.LOG:
            job.tell(JobStatus.LOG, event.get("message"))

    async def _describe(self, child: Child) -> None:
        with contextlib.suppress(ProcessEndedError):
            try:
                await child.answer(json_frame(FrameKind.EVENT, await self._outline()))
            except ApiError as error:
                await child.answer(_refusal(error))
            except ProcessEndedError:
                raise
            except Exception:
                logger.exception("a session could not be told of the model")
                await child.answer(_refusal(internal_error()))


def _check(request: TraceRequest) -> None:
    """Raise DecodeError for what is no trace of a session's model.

    Nobody has checked a key for its codec, so there is one that needs none.
    """
    head = request.head
    if (head.kind, head.dialect, head.codec) != ("trace", "vllm", "wire"):
        raise DecodeError(
            "a session on vLLM runs traces of VLLM that are written as 'wire', and nothing else"
        )


def _refusal(error: ApiError) -> Frame:
    return Frame(FrameKind.ERROR, error_bytes(error))


__all__ = ["SessionTraces"]
