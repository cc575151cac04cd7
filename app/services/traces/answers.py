"""One trace over HTTP, from the request's bytes to a stream of frames.

An error before the engine's first frame gets its own HTTP status; a later one becomes an ``ERROR`` frame.
A client's disconnect ends the trace at any stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.admission.estimates import of_trace
from app.admission.quotas import INTERVENING
from app.auth.code_policy import sandbox_of
from app.auth.principal import Principal
from app.body import read_bytes
from app.disconnect import while_connected
from app.engine.traces import event_frame
from app.errors import error_bytes, internal_error
from app.request_context import RequestContext, context_of
from app.services.streaming import ClosingStream
from app.services.traces.admission import check_head, check_sender
from nnsight_engine.remote_backend.frames import MEDIA_TYPE, Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.serialization import DecodeError

if TYPE_CHECKING:
    from app.context import Context

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 2**20
"""The maximum size of one write: the server applies backpressure in between, and never copies a whole result.
"""

Frames = AsyncGenerator[Frame, None]


async def answer_trace(context: Context, http: Request, caller: Principal) -> Response:
    """Return the response, whose body lasts until the trace has ended; raises ApiError, ClientDisconnect."""
    asked = context_of(http.scope)
    request = await read_trace(context, http, caller)
    asked.record.subject = job_id = f"trace-{secrets.token_hex(16)}"
    engine = context.traces.engine_for(request.head)
    frames = context.traces.run(request, job_id, asked.meter)
    del request  # it may be large
    opened = await while_connected(http.receive, _opened(frames), asked.deadline)
    return ClosingStream(
        _answer([event_frame(JobStatus.RECEIVED, job=job_id), *opened], frames, asked),
        media_type=MEDIA_TYPE,
        headers={
            "NNsight-Job-Id": job_id,
            "NNsight-Engine": engine.name,
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
        },
        on_close=frames.aclose,
        stall_s=context.settings.client_stall_timeout_s,
        final_event=_last_frame,
    )


async def read_trace(context: Context, http: Request, caller: Principal) -> TraceRequest:
    """Return an accepted trace; raises ApiError, or ClientDisconnect before the end of the body."""
    check_sender(context.settings, http, caller)
    asked = context_of(http.scope)
    admitted = asked.admitted
    if admitted is not None:
        await admitted.check(*INTERVENING)
    settings = context.settings
    body = await read_bytes(http, settings.max_trace_request_bytes, settings.upload_idle_timeout_s)
    try:
        if TraceRequest.is_slow(body):
            request = await asyncio.to_thread(TraceRequest.from_bytes, body)
        else:
            request = TraceRequest.from_bytes(body)
    except DecodeError as error:
        raise ApiError(ErrorCode.INVALID_TRACE, str(error)) from error
    await asked.record.note_trace(request)
    check_head(context.settings, caller, context.engine.served(), request.head)
    if admitted is not None:
        await admitted.reserve(of_trace(request.head))
    request.sandbox_of = sandbox_of(context.settings, caller)
    # The sender for fair queueing: the tenant or, without keys, the client's address.
    request.tenant = caller.tenant
    request.sender = caller.tenant or ("" if http.client is None else http.client.host)
    return request


async def _opened(frames: Frames) -> list[Frame]:
    """Return the frames up to the engine's first one, which follows one of the service."""
    try:
        return [await anext(frames), await anext(frames)]
    except StopAsyncIteration as error:
        raise internal_error() from error
    except BaseException:
        await frames.aclose()
        raise


async def _answer(
    opened: list[Frame], frames: Frames, asked: RequestContext
) -> AsyncGenerator[bytes | memoryview, None]:
    """Yield a trace's frames as bytes; an error becomes the last frame."""
    try:
        async with contextlib.aclosing(_completed(opened, frames, asked)) as completed:
            async for frame in completed:
                for piece in pieces(frame):
                    yield piece
    except ApiError as error:
        logger.info("a trace ended with %s: %s", error.code, error.message)
        asked.record.error = error.code
        yield _last_frame(error)
    except Exception:
        logger.exception("unhandled error in a trace")
        asked.record.error = ErrorCode.INTERNAL
        yield _last_frame(internal_error())
    finally:
        await frames.aclose()


async def _completed(opened: list[Frame], frames: Frames, asked: RequestContext) -> Frames:
    """Yield all frames of a trace, and a ``COMPLETED`` event before the result of one without errors."""
    has_failed = False
    for frame in opened:
        yield frame
    async for frame in frames:
        if frame.kind is FrameKind.RESULT:
            if has_failed:
                asked.record.error = ErrorCode.BLOCK_FAILED
            else:
                yield event_frame(JobStatus.COMPLETED)
            yield frame
            return
        has_failed |= frame.kind is FrameKind.EVENT and frame.json().get("status") == JobStatus.ERROR
        yield frame
    logger.error("a trace ended without a result")
    raise internal_error()


def _last_frame(error: ApiError) -> bytes:
    return b"".join(pieces(Frame(FrameKind.ERROR, error_bytes(error))))


def pieces(frame: Frame) -> Iterator[bytes | memoryview]:
    """Yield a frame's bytes in pieces that are each written at once."""
    data = memoryview(frame.data)
    if len(data) < _PIECE_BYTES:
        yield b"".join((frame.head(), data))
        return
    yield frame.head()
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
