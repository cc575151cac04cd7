"""Engines for traces in processes: a ``LanguageModel``, for what vLLM cannot run, and sessions on vLLM.

The code around a session's traces must run neither in this process nor in vLLM's workers. So it runs in a
process without a model, and its traces run in vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.engine.client import TraceEngine
from app.engine.trace_process_pool import ProcessJob, TraceProcesses
from app.http.errors import error_bytes, internal_error
from app.settings import Settings
from nnsight_engine.local_engine.trace_process import (
    LOCAL,
    OUTLINE,
    TRACE,
    ProcessEndedError,
    ProcessOptions,
    TraceProcess,
)
from nnsight_engine.remote_backend.errors import LocalBlockError
from nnsight_engine.remote_backend.frames import Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.serialization import DecodeError

logger = logging.getLogger(__name__)

Data = bytes | bytearray | memoryview


class LocalTraceEngine(TraceProcesses):
    name = queue = "local"
    purpose = "the local engine"
    starts_ahead = True

    def __init__(self, options: ProcessOptions, settings: Settings, environment: Mapping[str, str]) -> None:
        super().__init__("nnsight_engine.local_engine.process", options, settings, environment)
        self._timeout_s = settings.local_block_timeout_s

    async def serve_request(self, child: TraceProcess, message: dict[str, Any], job: ProcessJob) -> None:
        """Answer a message of a trace's process: ``LOCAL`` has the trace's client run a part of its block."""
        if LOCAL not in message:
            await super().serve_request(child, message, job)
            return
        await job.wait_answered()
        data = await _receive_announced(child, "a call to its client")
        job.serve(_answer_with(child, partial(self._call_client, child, data, job)))

    async def _call_client(self, child: TraceProcess, data: Data, job: ProcessJob) -> None:
        """Send data to the trace's client, and its answer to the process; raises ApiError if none comes."""
        if job.request.call_client is None:
            raise _unsupported(LocalBlockError.unreachable())
        # The answer counts as received until the process has it.
        async with contextlib.AsyncExitStack() as received:
            try:
                answer = await received.enter_async_context(job.request.call_client(data))
            except TimeoutError as error:
                raise _unsupported(LocalBlockError.unanswered(self._timeout_s)) from error
            await child.answer(Frame(FrameKind.RESULT, answer))


def _unsupported(error: LocalBlockError) -> ApiError:
    return ApiError(ErrorCode.UNSUPPORTED_COMBINATION, str(error))


Outline = Callable[[], Awaitable[dict[str, Any]]]
_PASSED_ON = frozenset({FrameKind.OUTPUTS, FrameKind.RESULT})


class SessionTraces(TraceProcesses):
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
        super().__init__(
            "nnsight_engine.local_engine.session_process",
            options,
            settings,
            environment,
            num_processes=settings.session_processes,
        )
        self._engine = engine
        self._outline = outline

    def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        """Run a session in a process, or a trace on the engine; see ``TraceEngine``."""
        run_on_engine = super().run_trace if request.head.kind == "session" else self._engine.run_trace
        return run_on_engine(request, job_id)

    async def serve_request(self, child: TraceProcess, message: dict[str, Any], job: ProcessJob) -> None:
        """Run a trace of the session, or describe the model to it."""
        await job.wait_answered()
        if TRACE in message:
            data = await _receive_announced(child, "a trace")
            # This task reads the process for no request in particular; the trace's usage, tier and spans
            # belong to the job's context.
            job.serve(
                _answer_with(child, partial(self._run_session_trace, child, data, job)), job.context.copy()
            )
        elif OUTLINE in message:
            job.serve(_answer_with(child, self._describe_model))
        else:
            await super().serve_request(child, message, job)

    async def _run_session_trace(self, child: TraceProcess, data: Data, job: ProcessJob) -> None:
        """Run a trace that a session's process has sent, for the session's model and tenant; answer it."""
        request = await asyncio.to_thread(TraceRequest.from_bytes, data)  # untrusted input
        _check_session_trace(request)
        # The block's process knows the model's own name only, not an adapter that the session names.
        session = job.request.head
        request.head = msgspec.structs.replace(
            request.head, model=session.model, revision=session.revision, fingerprint=session.fingerprint
        )
        request.tenant = job.request.tenant
        request.sandbox_of = job.request.sandbox_of
        frames = self._engine.run_trace(request, f"session-{secrets.token_hex(16)}")
        async with contextlib.aclosing(frames):
            async for frame in frames:
                if frame.kind in _PASSED_ON:
                    await child.answer(frame)
                elif frame.kind is FrameKind.EVENT and (event := frame.json())["status"] == JobStatus.LOG:
                    job.notify(JobStatus.LOG, event.get("message"))

    async def _describe_model(self) -> Frame:
        return json_frame(FrameKind.EVENT, await self._outline())


async def _receive_announced(child: TraceProcess, content: str) -> Data:
    """Return the data that must follow a process's message; ``content`` names them in the error."""
    kind, data = await child.frame()
    if kind is not FrameKind.RESULT:
        raise DecodeError(f"a trace process announced {content} and sent none")
    return data


async def _answer_with(child: TraceProcess, request: Callable[[], Awaitable[Frame | None]]) -> None:
    """Send what a request returns, None if it has sent its answer itself, or the error that it raises."""
    with contextlib.suppress(ProcessEndedError):
        try:
            answer = await request()
        except ProcessEndedError:
            raise
        except DecodeError as error:
            answer = _error_frame(ApiError(ErrorCode.INVALID_TRACE, str(error)))
        except ApiError as error:
            answer = _error_frame(error)
        except Exception:
            logger.exception("a request of a trace's process failed")
            answer = _error_frame(internal_error())
        if answer is not None:
            await child.answer(answer)


def _check_session_trace(request: TraceRequest) -> None:
    """Raise DecodeError unless the request is a trace for vLLM in the ``wire`` codec.

    No key was checked for the right to use another codec, so only the one that needs no right is accepted.
    """
    head = request.head
    if (head.kind, head.dialect, head.codec) != ("trace", "vllm", "wire"):
        raise DecodeError(
            "a session on vLLM runs traces of VLLM that are written as 'wire', and nothing else"
        )


def _error_frame(error: ApiError) -> Frame:
    return Frame(FrameKind.ERROR, error_bytes(error))
