"""``/v1/jobs/{id}/events``: a job's events, as server-sent events or over a WebSocket.

Both can start after any event number, so a client that was disconnected can resume.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated, Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Header, Query, WebSocket, WebSocketDisconnect
from sse_starlette import EventSourceResponse, ServerSentEvent

from api_schemas.errors import ApiError
from api_schemas.jobs import JobEvent
from app.auth.principal import Principal
from app.context import Coder, Context, Served
from app.errors import error_response
from app.openapi import EVENTS_TYPE, JOB_EVENTS, error_responses
from app.services.jobs.local_answers import LocalAnswers
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.serialization import DecodeError

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_PING_S: Final = 15
_SEND_TIMEOUT_S: Final = 60.0
_MAX_SEQ: Final = 2**31 - 1
_NORMAL, _GOING_AWAY, _UNSUPPORTED, _TRY_AGAIN_LATER = 1000, 1001, 1003, 1013

After = Annotated[int, Query(ge=0, le=_MAX_SEQ, description="The id of the last event received.")]


def _runs_parts(
    local: Annotated[bool | None, Query(description="Whether the client runs the job's local parts.")] = None,
) -> bool:
    return bool(local)


Local = Annotated[bool, Depends(_runs_parts)]
LastSeen = Annotated[
    int | None,
    Header(
        alias="Last-Event-ID",
        ge=0,
        le=_MAX_SEQ,
        description="The same as a header, as browsers send it; it takes precedence.",
    ),
]


class _Ping(msgspec.Struct):
    type: Literal["ping"]


@router.get(
    "/{job_id}/events",
    summary="Follow a job",
    response_class=EventSourceResponse,
    responses={
        200: {
            "description": "One event per change; the stream ends with the job.",
            "content": {EVENTS_TYPE: {"schema": JOB_EVENTS}},
        },
        **error_responses(404),
    },
)
async def follow_job(
    job_id: str, context: Served, caller: Coder, after: After = 0, last_seen: LastSeen = None
) -> EventSourceResponse:
    """Server-sent events: first the past events, then new ones as they happen. `id` is the event's number."""
    events = await context.jobs.follow(job_id, caller.tenant, after if last_seen is None else last_seen)
    return EventSourceResponse(
        _sent(events), ping=context.settings.sse_keep_alive_s or _PING_S, send_timeout=_SEND_TIMEOUT_S
    )


@router.websocket("/{job_id}/events")
async def follow_job_by_websocket(
    websocket: WebSocket, job_id: str, context: Served, caller: Coder, local: Local, after: After = 0
) -> None:
    """The same events as JSON text, `{"type": "event", …}`; `{"type": "ping"}` is answered with a pong.

    With `local=true` the job's calls of `tracer.local()` are sent too, and answers are accepted: `LOCAL`
    frames in binary messages.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(context.receiving.socket(caller.tenant))
            events = await context.jobs.follow(job_id, caller.tenant, after)
        except ApiError as error:
            await websocket.send_denial_response(error_response(error))
            return
        await _follow(websocket, job_id, events, context, caller, local=local)


async def _follow(
    websocket: WebSocket,
    job_id: str,
    events: AsyncGenerator[JobEvent, None],
    context: Context,
    caller: Principal,
    *,
    local: bool,
) -> None:
    await websocket.accept()
    sending = asyncio.create_task(_send_events(websocket, events), name=f"job-events-{job_id}")
    calls = context.jobs.local_calls
    intake = context.receiving.intake(caller.tenant)
    answers = LocalAnswers(calls, job_id, intake, context.settings.max_trace_request_bytes)
    listening = asyncio.create_task(_listen(websocket, answers if local else None))
    tasks = [sending, listening]
    if local:
        tasks.append(
            asyncio.create_task(_send_calls(websocket, calls.frames(job_id)), name=f"job-calls-{job_id}")
        )
    code: int | None = None
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if listening in done:  # also if the job ends now: the client is gone
            code = listening.result()
        else:
            for task in done:
                task.result()
            code = _NORMAL if await _is_over(context, job_id, caller.tenant) else _GOING_AWAY
    except WebSocketDisconnect:
        pass  # raised by a send
    finally:
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            answers.close()
    if code is not None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client has disconnected
            await websocket.close(code)


async def _sent(events: AsyncGenerator[JobEvent, None]) -> AsyncGenerator[ServerSentEvent, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            yield ServerSentEvent(event.model_dump_json(exclude_none=True), id=str(event.id))


async def _is_over(context: Context, job_id: str, owner: str) -> bool:
    """Return whether a job has ended; False if it was removed, or if its server stopped."""
    try:
        return (await context.jobs.get(job_id, owner)).status.is_final
    except ApiError:
        return False


async def _send_events(websocket: WebSocket, events: AsyncGenerator[JobEvent, None]) -> None:
    async with contextlib.aclosing(events):
        async for event in events:
            await websocket.send_json({"type": "event", **event.model_dump(mode="json", exclude_none=True)})


async def _send_calls(websocket: WebSocket, frames: AsyncGenerator[Frame, None]) -> None:
    async with contextlib.aclosing(frames):
        async for frame in frames:
            for piece in frame.pieces():
                await websocket.send_bytes(piece)


async def _listen(websocket: WebSocket, answers: LocalAnswers | None) -> int | None:
    """Process the client's messages; return the close code, or None if the client has disconnected."""
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        try:
            if answers is not None and message.get("bytes") is not None:
                answers.feed(message["bytes"])
                continue
            msgspec.json.decode(message.get("text") or b"", type=_Ping)
        except (msgspec.DecodeError, RecursionError, DecodeError):
            return _UNSUPPORTED
        except ApiError:
            return _TRY_AGAIN_LATER
        await websocket.send_json({"type": "pong"})
    return None
