"""How jobs change: the state of a job and the event that tells of it are written together, or not at all.

What a client asks for (``jobs``) and what servers do (``job_leases``) both go through ``change``, whose
conditions make sure that of two that want to change a job only one does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, insert, select, update
from sqlalchemy.orm import Session

from api_schemas.errors import ErrorCode
from api_schemas.jobs import JobEvent, JobStatus
from app.json_text import printable
from app.storage.tables import EventRow, JobRow

EVENT_BYTES: Final = 128
"""What an event takes in the database beside its message."""

CANCELLED_MESSAGE: Final = "The job was cancelled."
FINAL: Final = [status.value for status in JobStatus if status.is_final]
MAX_MESSAGE_CHARS: Final = 64 * 1024
_CUT: Final = "… (cut)"


def change(
    session: Session, number: int, *conditions: ColumnElement[bool], events: Sequence[JobEvent], **values: Any
) -> bool:
    """Add events to a job and set its columns; returns whether it still met the conditions.

    The job's status becomes that of the last event which is not a ``LOG``.
    """
    states = [event.status for event in events if event.status is not JobStatus.LOG]
    if states:
        values["status"] = states[-1].value
    changed = session.execute(
        update(JobRow)
        .where(JobRow.number == number, *conditions)
        .values(
            num_events=JobRow.num_events + len(events),
            event_bytes=JobRow.event_bytes + size_of(events),
            **values,
        )
        .returning(JobRow.num_events)
        .execution_options(synchronize_session=False)
    ).all()
    if not changed:
        return False
    add_events(session, number, changed[0][0] - len(events), events)
    return True


def add_events(session: Session, number: int, num_before: int, events: Sequence[JobEvent]) -> None:
    """Write events; ``num_before`` is how many the job had."""
    if events:
        session.execute(
            insert(EventRow),
            [
                {
                    "job_number": number,
                    "seq": num_before + count,
                    "status": event.status.value,
                    "time": event.time,
                    "message": storable(event.message),
                    "engine": event.engine,
                }
                for count, event in enumerate(events, 1)
            ],
        )


def size_of(events: Sequence[JobEvent]) -> int:
    """Return how many bytes events count as; the message of an end is kept with the job too."""
    return sum(
        EVENT_BYTES + len((storable(event.message) or "").encode()) * (2 if event.status.is_final else 1)
        for event in events
    )


def ended(
    status: JobStatus, ttl_s: float, *, code: ErrorCode | str | None = None, message: str | None = None
) -> tuple[JobEvent, dict[str, Any]]:
    """Return the event of a job's end, and what it sets."""
    event = now(status, message)
    values: dict[str, Any] = {
        "finished_at": event.time,
        "expires_at": event.time + ttl_s,
        "code": None if code is None else str(code),
        "message": storable(message),
        "lease_by": None,
        "lease_until": None,
    }
    return event, values


def cancelled(ttl_s: float) -> tuple[JobEvent, dict[str, Any]]:
    """Return the event of a job's end that was asked for, and what it sets."""
    return ended(JobStatus.CANCELLED, ttl_s, code=ErrorCode.JOB_CANCELLED, message=CANCELLED_MESSAGE)


def now(status: JobStatus, message: str | None = None) -> JobEvent:
    """Return an event that happens now."""
    return JobEvent(status=status, time=time.time(), message=message)


def storable(message: str | None) -> str | None:
    """Return a message as every database can keep it: valid, without NUL, not too long."""
    if message is None:
        return None
    text = printable(message).replace("\0", "\\x00")
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - len(_CUT)] + _CUT


def row_of(session: Session, job_id: str, owner: str) -> JobRow | None:
    """Return a job that is there for its owner."""
    return session.scalar(
        select(JobRow).where(JobRow.id == job_id, JobRow.owner == owner, JobRow.removed.is_(False))
    )
