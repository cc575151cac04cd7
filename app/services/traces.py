"""Traces from a client's message to the frames of the answer, for ``/v1/traces`` and for jobs.

The sender is admitted before the body is read, the head before its parts are. An error before the engine's
first frame gets its own HTTP status; a later one becomes an ``ERROR`` frame. A client's disconnect ends the
trace at any stage.

The sandbox takes ten seconds to start, and ends with its engine. So the lifecycle starts it early, each time
that an engine becomes ready, where keys exist whose code would wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from api_schemas.server import TraceOutline
from app.admission.estimates import of_trace
from app.admission.rates import INTERVENING
from app.auth.keys import Keys
from app.auth.principal import Principal, check_code_allowed, check_codec, codecs_of, sandbox_of, takes_code
from app.engine.client import EngineClient, TraceEngine, event_frame
from app.engine.served_model import ServedModel
from app.http.bodies import check_media_type, read_bytes
from app.http.contexts import RequestContext, context_of, while_connected
from app.http.errors import error_bytes, internal_error
from app.services.streaming import ClosingStream
from app.settings import Settings
from nnsight_engine.core.work_context import UsageMeter
from nnsight_engine.remote_backend.frames import MEDIA_TYPE, Frame, FrameKind
from nnsight_engine.remote_backend.messages import MEDIA_TYPE as TRACE_TYPE
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
from nnsight_engine.serialization import DecodeError

if TYPE_CHECKING:
    from app.components import Components


def check_sender(settings: Settings, http: Request, caller: Principal) -> None:
    """Raise ApiError ``code_not_allowed``, ``missing_scope`` or ``bad_request`` (wrong content type)."""
    check_code_allowed(settings, caller)
    # An HTML form cannot send this type: for it a browser makes a CORS preflight request first.
    check_media_type(http, TRACE_TYPE)


def check_head(settings: Settings, caller: Principal, served: ServedModel, head: TraceHead) -> None:
    """Raise ApiError ``codec_not_allowed`` or ``model_not_found``."""
    check_codec(head, caller, settings)
    served.check(head)


def check_still_allowed(settings: Settings, head: TraceHead) -> None:
    """Raise ApiError if the settings no longer allow a trace that was accepted earlier."""
    if settings.allow_code is False:
        raise ApiError(
            ErrorCode.CODE_NOT_ALLOWED, "This server no longer accepts traces: allow_code is false."
        )
    if head.codec not in codecs_of(settings):
        raise ApiError(
            ErrorCode.CODEC_NOT_ALLOWED,
            f"This server no longer accepts blocks written in {head.codec!r}; send them in 'wire'.",
            "codec",
        )


logger = logging.getLogger(__name__)


async def start_sandbox(settings: Settings, engine: EngineClient, keys: Keys) -> None:
    """Start the sandbox if some key's code needs one; errors are logged, and the first request gets them."""
    if settings.sandbox != "process" or not takes_code(settings):
        return
    try:
        if await keys.need_sandbox():
            await engine.prepare_sandbox()
    except ApiError as error:
        logger.warning("the sandbox could not be started ahead: %s", error.message)
    except Exception:
        logger.exception("the sandbox could not be started ahead")


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
            raise _no_engine(name, able)
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


def _no_engine(name: str, able: str) -> ApiError:
    if name != able:
        model_class = "LanguageModel" if able == "local" else "VLLM"
        message = (
            f"The blocks name modules of {model_class}, which {able!r} runs, and ask for {name!r}: leave "
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


Frames = AsyncGenerator[Frame, None]


async def answer_trace(components: Components, http: Request, caller: Principal) -> Response:
    """Return the response, whose body lasts until the trace has ended; raises ApiError, ClientDisconnect."""
    context = context_of(http.scope)
    request = await read_trace(components, http, caller)
    context.record.subject = job_id = f"trace-{secrets.token_hex(16)}"
    engine = components.traces.engine_for(request.head)
    frames = components.traces.run(request, job_id, context.meter)
    del request  # it may be large
    first_frames = await while_connected(http.receive, _first_frames(frames), context.deadline)
    return ClosingStream(
        _frames_as_bytes([event_frame(JobStatus.RECEIVED, job=job_id), *first_frames], frames, context),
        media_type=MEDIA_TYPE,
        headers={
            "NNsight-Job-Id": job_id,
            "NNsight-Engine": engine.name,
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
        },
        on_close=frames.aclose,
        stall_s=components.settings.client_stall_timeout_s,
        final_event=last_frame,
    )


async def read_trace(components: Components, http: Request, caller: Principal) -> TraceRequest:
    """Return an accepted trace; raises ApiError, or ClientDisconnect before the end of the body."""
    check_sender(components.settings, http, caller)
    context = context_of(http.scope)
    admitted = context.admitted
    if admitted is not None:
        await admitted.check(*INTERVENING)
    settings = components.settings
    body = await read_bytes(http, settings.max_trace_request_bytes, settings.upload_idle_timeout_s)
    try:
        if TraceRequest.is_slow(body):
            request = await asyncio.to_thread(TraceRequest.from_bytes, body)
        else:
            request = TraceRequest.from_bytes(body)
    except DecodeError as error:
        raise ApiError(ErrorCode.INVALID_TRACE, str(error)) from error
    await context.record.note_trace(request)
    check_head(components.settings, caller, components.engine.served(), request.head)
    if admitted is not None:
        await admitted.reserve(of_trace(request.head))
    request.sandbox_of = sandbox_of(components.settings, caller)
    # The sender for fair queueing: the tenant or, without keys, the client's address.
    request.tenant = caller.tenant
    request.sender = caller.tenant or ("" if http.client is None else http.client.host)
    return request


async def _first_frames(frames: Frames) -> list[Frame]:
    """Return the frames up to the engine's first one, which follows one of the service."""
    try:
        return [await anext(frames), await anext(frames)]
    except StopAsyncIteration as error:
        raise internal_error() from error
    except BaseException:
        await frames.aclose()
        raise


async def _frames_as_bytes(
    first_frames: list[Frame], frames: Frames, context: RequestContext
) -> AsyncGenerator[bytes | memoryview, None]:
    """Yield a trace's frames as bytes; an error becomes the last frame."""
    try:
        async with contextlib.aclosing(_with_completed_event(first_frames, frames, context)) as completed:
            async for frame in completed:
                for piece in frame.pieces():
                    yield piece
    except ApiError as error:
        logger.info("a trace ended with %s: %s", error.code, error.message)
        context.record.error = error.code
        yield last_frame(error)
    except Exception:
        logger.exception("unhandled error in a trace")
        context.record.error = ErrorCode.INTERNAL
        yield last_frame(internal_error())
    finally:
        await frames.aclose()


async def _with_completed_event(first_frames: list[Frame], frames: Frames, context: RequestContext) -> Frames:
    """Yield all frames of a trace, and a ``COMPLETED`` event before the result of one without errors."""
    has_failed = False
    for frame in first_frames:
        yield frame
    async for frame in frames:
        if frame.kind is FrameKind.RESULT:
            if has_failed:
                context.record.error = ErrorCode.BLOCK_FAILED
            else:
                yield event_frame(JobStatus.COMPLETED)
            yield frame
            return
        has_failed |= frame.kind is FrameKind.EVENT and frame.json().get("status") == JobStatus.ERROR
        yield frame
    logger.error("a trace ended without a result")
    raise internal_error()


def last_frame(error: ApiError) -> bytes:
    """Return the only or last frame of a trace that ends with an error of the server."""
    return b"".join(Frame(FrameKind.ERROR, error_bytes(error)).pieces())
