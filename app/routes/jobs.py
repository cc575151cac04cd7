"""``/v1/jobs``: traces that run independently of the client's connection, and their events.

Events are server-sent events or come over a WebSocket. Both can start after any event number, so a client
that was disconnected can resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator
from typing import Annotated, Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Header, Query, WebSocket, WebSocketDisconnect
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import Job, JobEvent, JobList, JobStatus
from app.admission.rates import Quota
from app.auth.principal import Principal, check_code_allowed
from app.components import Components
from app.http.bodies import stream_bytes
from app.http.contexts import RequestContext
from app.http.errors import RETRY_AFTER_S, error_response
from app.http.openapi import BINARY, EVENTS_TYPE, JOB_EVENTS, TRACE_BODY, AfterId, PageLimit, error_responses
from app.limits.limit import Holder
from app.routes.parameters import Coder, CurrentContext, ServerComponents
from app.services.jobs.local_calls import LocalAnswers
from app.services.streaming import download
from app.services.traces import check_head, check_sender
from nnsight_engine.remote_backend.frames import MEDIA_TYPE as FRAMES_TYPE
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.serialization import DecodeError

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_LOCATION: Final = {"Location": {"description": "The job's path.", "schema": {"type": "string"}}}

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x20-\x7e]{1,255}$",
        description="Idempotency key chosen by the client: a request sent again with it does not run again.",
    ),
]


@router.post(
    "",
    status_code=202,
    summary="Run a trace as a job",
    openapi_extra=TRACE_BODY,
    responses={
        200: {
            "model": Job,
            "description": "The key was used for this request before: its job.",
            "headers": _LOCATION,
        },
        202: {"headers": _LOCATION},
        **error_responses(400, 403, 404, 409, 413, 429, 503),
    },
)
async def create_job(
    request: Request,
    response: Response,
    components: ServerComponents,
    context: CurrentContext,
    caller: Coder,
    *,
    key: Key = None,
    rerun: Annotated[
        bool, Query(description="Run the job again from its beginning if the server fails while it runs.")
    ] = False,
) -> Job:
    """The body is that of `POST /v1/traces`. An accepted job survives a restart of the server."""
    check_sender(components.settings, request, caller)
    await check_quotas(context)
    settings = components.settings
    body = stream_bytes(request, settings.max_trace_request_bytes, settings.upload_idle_timeout_s)
    check = functools.partial(check_head, settings, caller, components.engine.served())
    holder = Holder(caller.tenant, caller.key_id)
    job, is_new = await components.jobs.submit(
        body, check=check, key=key, holder=holder, reruns=rerun, traceparent=context.traceparent
    )
    context.record.subject, context.record.model = job.id, job.model
    response.status_code = 202 if is_new else 200
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


async def check_quotas(context: RequestContext) -> None:
    """Raise ApiError unless the caller's quotas permit a job now; usage is counted when the job runs."""
    if context.admitted is not None:
        await context.admitted.check(*Quota)


@router.get("", summary="List jobs, the newest first", responses=error_responses(404))
async def list_jobs(
    components: ServerComponents,
    caller: Coder,
    limit: PageLimit = 20,
    after: AfterId = None,
    status: Annotated[JobStatus | None, Query(description="Only jobs with this status.")] = None,
) -> JobList:
    """A page of jobs; pass its `last_id` as `after` for the next."""
    return await components.jobs.page(caller.tenant, status=status, after=after, limit=limit)


@router.get("/{job_id}", summary="Get a job's state", responses=error_responses(404))
async def get_job(job_id: str, components: ServerComponents, caller: Coder) -> Job:
    """The job's status, times and sizes, and its error if it failed."""
    return await components.jobs.get(job_id, caller.tenant)


@router.delete("/{job_id}", status_code=204, summary="End and remove a job", responses=error_responses(404))
async def delete_job(job_id: str, components: ServerComponents, caller: Coder) -> None:
    """Deletes the job's request and result; its id becomes unknown. A running job ends shortly after."""
    await components.jobs.remove(job_id, caller.tenant)


@router.post("/{job_id}/cancel", summary="End a job", responses=error_responses(404))
async def cancel_job(job_id: str, components: ServerComponents, caller: Coder) -> Job:
    """A queued job ends at once, a running one shortly after; a finished one stays as it is."""
    return await components.jobs.cancel(job_id, caller.tenant)


@router.post(
    "/{job_id}/rerun",
    status_code=202,
    summary="Run a job again",
    responses=error_responses(403, 404, 409, 429, 503),
)
async def rerun_job(job_id: str, components: ServerComponents, context: CurrentContext, caller: Coder) -> Job:
    """Only for a job that failed or was cancelled; its earlier result is deleted."""
    check_code_allowed(components.settings, caller)
    await check_quotas(context)
    return await components.jobs.rerun(job_id, Holder(caller.tenant, caller.key_id), context.traceparent)


@router.get(
    "/{job_id}/result",
    summary="Fetch a job's result",
    response_class=Response,
    responses={
        200: {
            "description": "The frames that `POST /v1/traces` would have ended with, see docs/remote.md.",
            "content": {FRAMES_TYPE: {"schema": BINARY}},
        },
        206: {
            "description": "The part that `Range` asks for.",
            "content": {FRAMES_TYPE: {"schema": BINARY}},
        },
        **error_responses(404, 409, 416, 429),
    },
)
async def get_job_result(
    job_id: str, request: Request, components: ServerComponents, caller: Coder
) -> Response:
    """A job without a result answers with the `ERROR` frame that says why. `Range` resumes a download."""
    try:
        tag, result = await components.jobs.result(job_id, caller.tenant)
    except ApiError as error:
        if error.code is ErrorCode.JOB_NOT_FINISHED:
            return error_response(error, {"Retry-After": str(RETRY_AFTER_S)})
        raise
    if isinstance(result, bytes):
        return Response(result, media_type=FRAMES_TYPE, headers={"ETag": tag})
    stall_s = components.settings.client_stall_timeout_s
    return await download(request, result, media_type=FRAMES_TYPE, tag=tag, stall_s=stall_s)


events_router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

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


@events_router.get(
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
    job_id: str, components: ServerComponents, caller: Coder, after: After = 0, last_seen: LastSeen = None
) -> EventSourceResponse:
    """Server-sent events: first the past events, then new ones as they happen. `id` is the event's number."""
    events = await components.jobs.follow(job_id, caller.tenant, after if last_seen is None else last_seen)
    return EventSourceResponse(
        _server_sent_events(events),
        ping=components.settings.sse_keep_alive_s or _PING_S,
        send_timeout=_SEND_TIMEOUT_S,
    )


@events_router.websocket("/{job_id}/events")
async def follow_job_by_websocket(
    websocket: WebSocket,
    job_id: str,
    components: ServerComponents,
    caller: Coder,
    local: Local,
    after: After = 0,
) -> None:
    """The same events as JSON text, `{"type": "event", …}`; `{"type": "ping"}` is answered with a pong.

    With `local=true` the job's calls of `tracer.local()` are sent too, and answers are accepted: `LOCAL`
    frames in binary messages.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(components.sockets.spend(caller.tenant, 1))
            events = await components.jobs.follow(job_id, caller.tenant, after)
        except ApiError as error:
            await websocket.send_denial_response(error_response(error))
            return
        await _follow_over_socket(websocket, job_id, events, components, caller, local=local)


async def _follow_over_socket(
    websocket: WebSocket,
    job_id: str,
    events: AsyncGenerator[JobEvent, None],
    components: Components,
    caller: Principal,
    *,
    local: bool,
) -> None:
    """Send events, and with ``local`` calls, until the job, the client or the server ends; then close."""
    await websocket.accept()
    sending = asyncio.create_task(_send_events(websocket, events), name=f"job-events-{job_id}")
    calls = components.jobs.calls
    new_spending = functools.partial(components.received.spend, caller.tenant)
    answers = LocalAnswers(calls, job_id, new_spending, components.settings.max_trace_request_bytes)
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
            code = _NORMAL if await _is_over(components, job_id, caller.tenant) else _GOING_AWAY
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


async def _server_sent_events(
    events: AsyncGenerator[JobEvent, None],
) -> AsyncGenerator[ServerSentEvent, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            yield ServerSentEvent(event.model_dump_json(exclude_none=True), id=str(event.id))


async def _is_over(components: Components, job_id: str, owner: str) -> bool:
    """Return whether a job has ended; False if it was removed, or if its server stopped."""
    try:
        return (await components.jobs.get(job_id, owner)).status.is_final
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
                await websocket.send_bytes(bytes(piece))


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
