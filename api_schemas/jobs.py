"""The schemas of jobs, which are traces that a server runs in the background: states, events, results."""

from __future__ import annotations

import enum
from typing import Final, Literal

from pydantic import BaseModel, Field

from api_schemas.fields import Listed, Page


class JobStatus(enum.StrEnum):
    """The status of a job; ``LOG`` is an event and not a status."""

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
        return self in _FINAL


_FINAL: Final = frozenset({JobStatus.COMPLETED, JobStatus.ERROR, JobStatus.CANCELLED})


class JobEvent(BaseModel):
    """An event of a job.

    Attributes:
        id: Its number within the job, from 1; a client that reconnects sends the last one it received.
        job: The job.
        status: The new status, or ``LOG``.
        time: The time of the event, in seconds since 1970.
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
        model: The client's name of the model.
        dialect: The module names that the blocks use, of ``vllm`` or ``transformers``.
        kind: ``trace`` or ``session``.
        num_blocks: The number of its blocks.
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
    """The reason why a job failed: a message for people, and an error code."""

    message: str
    code: str


class Job(Listed):
    """A trace that runs without a waiting client; times are seconds since 1970.

    Attributes:
        id: Its id; on a server without keys, any client that knows it may read and end the job.
        object: Always ``job``.
        status: Its status.
        model: The server's name of the model that runs it.
        engine: The engine that runs it, ``vllm`` or ``local``, once known.
        request: Properties of its request.
        error: The reason why it ended without having completed.
        created_at: The time at which it was accepted.
        started_at: The time at which its blocks began to run.
        finished_at: The time at which it ended.
        expires_at: The time at which it and its result are deleted; None until it has ended.
        idempotency_key: The idempotency key chosen by the client.
        request_bytes: Size of the request.
        result_bytes: Size of the result; None if there is none.
        attempt: The number of runs so far.
        num_events: The number of its events, which is the id of the last one.
        reruns: Whether it is run again automatically if its server fails while it runs.
        cancel_requested: Whether its cancellation was requested.
    """

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


class JobList(Page[Job]):
    """A page of jobs, the newest first, in the format of OpenAI's lists."""
