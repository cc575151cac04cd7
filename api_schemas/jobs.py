"""Jobs: a trace that a server runs while nobody waits, what states it goes through and what it tells."""

from __future__ import annotations

import enum
from typing import Final

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
        """Whether nothing follows it."""
        return self in _FINAL


_FINAL: Final = frozenset({JobStatus.COMPLETED, JobStatus.ERROR, JobStatus.CANCELLED})


class JobEvent(BaseModel):
    """Something that happened to a job.

    Attributes:
        id: Its number within the job, from 1; what a client that comes back names as the last it has seen.
        job: The job.
        status: What happened.
        time: When, in seconds since 1970.
        message: What the block printed, or why it failed.
        engine: What runs it, ``vllm`` or ``local``, once that is known.
    """

    id: int = 0
    job: str = ""
    status: JobStatus
    time: float = Field(default=0.0)
    message: str | None = None
    engine: str | None = None


__all__ = ["JobEvent", "JobStatus"]
