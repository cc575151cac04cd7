"""The schemas of jobs, which are traces that a server runs in the background: states, events, results."""

from __future__ import annotations

import enum
from typing import Final, Literal

from pydantic import BaseModel, Field


class JobStatus(enum.StrEnum):
    """Where a job is; ``LOG`` is an event and not a state."""

    RECEIVED = "RECEIVED"
    QUEUED = "QUEUED"
    DISPATCHED = "DISPATCHED"
    RUNNING = "RUNNING"
    LOG = "LOG"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        """Whether it is the last event of a job."""
        return self in _FINAL


_FINAL: Final = frozenset({JobStatus.COMPLETED, JobStatus.ERROR, JobStatus.CANCELLED})


class JobEvent(BaseModel):
    """An event of a job.

    Attributes:
        id: Its number within the job, from 1; a client that reconnects sends the last one it received.
        job: The job.
        status: The new status, or ``LOG``.
        time: When, in seconds since 1970.
        message: Printed text, or the reason of a failure.
        engine: The engine that runs it, ``vllm`` or ``local``, once known.
    """

    id: int = 0
    job: str = ""
    status: JobStatus
    time: float = Field(default=0.0)
    message: str | None = None
    engine: str | None = None


class JobSummary(BaseModel):
    """Properties of a job's request.

    Attributes:
        model: The model, as the client calls it.
        dialect: The module names that the blocks use, of ``vllm`` or ``transformers``.
        kind: ``trace`` or ``session``.
        num_blocks: How many blocks it has.
        python: The client's version of Python.
        client: The client's version of this package.
    """

    model: str
    dialect: str
    kind: str
    num_blocks: int
    python: str
    client: str


class JobError(BaseModel):
    """Why a job failed: for people, and as one of the error codes."""

    message: str
    code: str


class Job(BaseModel):
    """A trace that runs without a waiting client; times are seconds since 1970.

    Attributes:
        id: Its id; on a server without keys, any client that knows it may read and end the job.
        object: Always ``job``.
        status: Where it is.
        model: The server's name of the model that runs it.
        engine: The engine that runs it, ``vllm`` or ``local``, once known.
        request: Properties of its request.
        error: Why it ended without having completed.
        created_at: When it was accepted.
        started_at: When its blocks began to run.
        finished_at: When it ended.
        expires_at: When it and its result go; None until it has ended.
        idempotency_key: The client's own name for it.
        request_bytes: Size of the request.
        result_bytes: Size of the result; None where there is none.
        attempt: How often it was begun.
        num_events: How many events it has; the id of the last one.
        reruns: Whether it runs again by itself where the server dies while it runs.
        cancel_requested: Whether it is being ended.
    """

    id: str
    object: Literal["job"] = "job"
    status: JobStatus
    model: str
    engine: str | None = None
    request: JobSummary
    error: JobError | None = None
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    expires_at: float | None = None
    idempotency_key: str | None = None
    request_bytes: int
    result_bytes: int | None = None
    attempt: int
    num_events: int
    reruns: bool
    cancel_requested: bool


class JobList(BaseModel):
    """A page of jobs, the newest first, in the shape of OpenAI's lists.

    Attributes:
        object: Always ``list``.
        data: The jobs.
        first_id: The first one's id.
        last_id: The last one's id: the next page comes ``after`` it.
        has_more: Whether there is a next page.
    """

    object: Literal["list"] = "list"
    data: list[Job]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


__all__ = ["Job", "JobError", "JobEvent", "JobList", "JobStatus", "JobSummary"]
