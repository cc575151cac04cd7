"""Jobs as the API shows them, from the database's rows."""

from __future__ import annotations

from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import Job, JobError, JobStatus, JobSummary
from app.errors import error_bytes
from app.json_text import printable
from app.storage.tables import JobRow
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceHead

_MAX_NAME_CHARS: Final = 500


def summary_of(head: TraceHead) -> JobSummary:
    return JobSummary(
        model=_short(head.model),
        dialect=head.dialect,
        kind=head.kind,
        num_blocks=len(head.groups),
        python=_short(head.python),
        client=_short(head.client),
    )


def _short(text: str) -> str:
    return printable(text).replace("\0", "")[:_MAX_NAME_CHARS]


def job_of(row: JobRow) -> Job:
    error = None
    if row.code is not None:
        error = JobError(message=row.message or "", code=row.code)
    return Job(
        id=row.id,
        status=JobStatus(row.status),
        model=row.model,
        engine=row.engine,
        request=JobSummary.model_validate(row.head),
        error=error,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        expires_at=row.expires_at,
        idempotency_key=row.idempotency_key,
        request_bytes=row.request_bytes,
        result_bytes=row.result_bytes,
        attempt=row.attempt,
        num_events=row.num_events,
        reruns=row.reruns,
        cancel_requested=row.cancel_requested,
    )


def error_frame(row: JobRow) -> bytes:
    """Return the only frame of a job that has no result: the error that ended it."""
    try:
        code = ErrorCode(row.code or "")
    except ValueError:
        code = ErrorCode.INTERNAL
    frame = Frame(FrameKind.ERROR, error_bytes(ApiError(code, row.message or "")))
    return frame.head() + bytes(frame.data)
