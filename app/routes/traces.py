"""``POST /v1/traces``: runs a client's blocks; ``GET /v1/traces/outline``: the modules that they may name.

The sender is admitted before the body is read, the head before its parts are. An error before the engine's
first frame gets its own HTTP status; a later one becomes an ``ERROR`` frame. A client's disconnect ends the
trace at any stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from api_schemas.server import TraceOutline
from app.admission.estimates import of_trace
from app.admission.rates import INTERVENING
from app.auth.principal import Principal, sandbox_of
from app.components import Components
from app.engine.client import event_frame
from app.http.bodies import read_bytes
from app.http.contexts import RequestContext, context_of, while_connected
from app.http.errors import internal_error
from app.http.openapi import TRACE_ANSWERS, TRACE_BODY, error_responses
from app.routes.parameters import CODER, Coder, ServerComponents
from app.services.streaming import ClosingStream
from app.services.traces import check_head, check_sender, last_frame, model_outline
from nnsight_engine.remote_backend.frames import MEDIA_TYPE, Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.serialization import DecodeError

logger = logging.getLogger(__name__)

Frames = AsyncGenerator[Frame, None]

router = APIRouter(prefix="/v1/traces", tags=["traces"])


@router.post(
    "",
    summary="Run a trace and return its events and result",
    response_class=Response,
    openapi_extra=TRACE_BODY,
    responses=TRACE_ANSWERS,
)
async def run_trace(request: Request, components: ServerComponents, caller: Coder) -> Response:
    """The body contains blocks; the response is a stream of frames: events, outputs, and the saved values."""
    context = context_of(request.scope)
    trace = await _read_trace(components, request, caller)
    context.record.subject = job_id = f"trace-{secrets.token_hex(16)}"
    engine = components.traces.engine_for(trace.head)
    frames = components.traces.run(trace, job_id, context.meter)
    del trace  # it may be large
    first_frames = await while_connected(request.receive, _first_frames(frames), context.deadline)
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


@router.get(
    "/outline",
    dependencies=[CODER],
    summary="List the model's modules, for clients that write blocks without loading the model",
    responses=error_responses(503),
)
async def get_outline(components: ServerComponents) -> TraceOutline:
    """The modules as vLLM has them, with their paths, and the standard points."""
    return await model_outline(components.engine, components.traces.names)


async def _read_trace(components: Components, http: Request, caller: Principal) -> TraceRequest:
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
