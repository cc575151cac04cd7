"""``/v1/jobs``: traces that run independently of the client's connection."""

from __future__ import annotations

import functools
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import Job, JobList, JobStatus
from app.admission.quotas import Quota
from app.auth.code_policy import check_code_allowed
from app.body import stream_bytes
from app.context import Asked, Coder, Served
from app.errors import RETRY_AFTER_S, error_response
from app.openapi import BINARY, TRACE_BODY, error_responses
from app.request_context import RequestContext
from app.routes.paging import AfterId, PageLimit
from app.services.downloads import download
from app.services.traces.admission import check_head, check_sender
from app.storage.storage_usage import Holder
from nnsight_engine.remote_backend.frames import MEDIA_TYPE as FRAMES_TYPE

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
    context: Served,
    asked: Asked,
    caller: Coder,
    *,
    key: Key = None,
    rerun: Annotated[
        bool, Query(description="Run the job again from its beginning if the server fails while it runs.")
    ] = False,
) -> Job:
    """The body is that of `POST /v1/traces`. An accepted job survives a restart of the server."""
    check_sender(context.settings, request, caller)
    await check_quotas(asked)
    settings = context.settings
    body = stream_bytes(request, settings.max_trace_request_bytes, settings.upload_idle_timeout_s)
    check = functools.partial(check_head, context.settings, caller, context.engine.served())
    holder = Holder(caller.tenant, caller.key_id)
    submitted = await context.jobs.submit(
        body, check=check, key=key, holder=holder, reruns=rerun, traceparent=asked.traceparent
    )
    asked.record.subject, asked.record.model = submitted.job.id, submitted.job.model
    response.status_code = 202 if submitted.is_new else 200
    response.headers["Location"] = f"/v1/jobs/{submitted.job.id}"
    return submitted.job


async def check_quotas(asked: RequestContext) -> None:
    """Raise ApiError unless the caller's quotas permit a job now; usage is counted when the job runs."""
    if asked.admitted is not None:
        await asked.admitted.check(*Quota)


@router.get("", summary="List jobs, the newest first", responses=error_responses(404))
async def list_jobs(
    context: Served,
    caller: Coder,
    limit: PageLimit = 20,
    after: AfterId = None,
    status: Annotated[JobStatus | None, Query(description="Only jobs with this status.")] = None,
) -> JobList:
    """A page of jobs; pass its `last_id` as `after` for the next."""
    return await context.jobs.page(caller.tenant, status=status, after=after, limit=limit)


@router.get("/{job_id}", summary="Get a job's state", responses=error_responses(404))
async def get_job(job_id: str, context: Served, caller: Coder) -> Job:
    """The job's status, times and sizes, and its error if it failed."""
    return await context.jobs.get(job_id, caller.tenant)


@router.delete("/{job_id}", status_code=204, summary="End and remove a job", responses=error_responses(404))
async def delete_job(job_id: str, context: Served, caller: Coder) -> None:
    """Deletes the job's request and result; its id becomes unknown. A running job ends shortly after."""
    await context.jobs.remove(job_id, caller.tenant)


@router.post("/{job_id}/cancel", summary="End a job", responses=error_responses(404))
async def cancel_job(job_id: str, context: Served, caller: Coder) -> Job:
    """A queued job ends at once, a running one shortly after; a finished one stays as it is."""
    return await context.jobs.cancel(job_id, caller.tenant)


@router.post(
    "/{job_id}/rerun",
    status_code=202,
    summary="Run a job again",
    responses=error_responses(403, 404, 409, 429, 503),
)
async def rerun_job(job_id: str, context: Served, asked: Asked, caller: Coder) -> Job:
    """Only for a job that failed or was cancelled; its earlier result is deleted."""
    check_code_allowed(context.settings, caller)
    await check_quotas(asked)
    return await context.jobs.rerun(job_id, Holder(caller.tenant, caller.key_id), asked.traceparent)


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
async def get_job_result(job_id: str, request: Request, context: Served, caller: Coder) -> Response:
    """A job without a result answers with the `ERROR` frame that says why. `Range` resumes a download."""
    try:
        result = await context.jobs.result(job_id, caller.tenant)
    except ApiError as error:
        if error.code is ErrorCode.JOB_NOT_FINISHED:
            return error_response(error, {"Retry-After": str(RETRY_AFTER_S)})
        raise
    if result.file is None:
        return Response(result.frame, media_type=FRAMES_TYPE, headers={"ETag": result.tag})
    stall_s = context.settings.client_stall_timeout_s
    return await download(request, result.file, media_type=FRAMES_TYPE, tag=result.tag, stall_s=stall_s)
