"""State transitions of jobs: the state and its event are written together or not at all."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, case, insert, update
from sqlalchemy.orm import Session

from api_schemas.errors import ErrorCode, printable
from api_schemas.jobs import JobEvent, JobStatus
from app.storage.tables import EventRow, JobRow

EVENT_BYTES: Final = 128
"""The size of an event in the database, beside its message."""

FINAL: Final = [status.value for status in JobStatus if status.is_final]
MAX_MESSAGE_CHARS: Final = 64 * 1024
_CUT: Final = "… (cut)"
_AT_ONCE: Final = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class JobEnd:
    status: JobStatus
    message: str | None = None
    code: ErrorCode | str | None = None
    result_bytes: int | None = None


CANCELLED: Final = JobEnd(JobStatus.CANCELLED, "The job was cancelled.", ErrorCode.JOB_CANCELLED)


def change(
    session: Session, number: int, *conditions: ColumnElement[bool], events: Sequence[JobEvent], **values: Any
) -> bool:
    """Append events and set columns; False if the job no longer meets the conditions, so one writer wins.

    The job's status becomes that of the last event that is not a ``LOG``.
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


def finish(
    session: Session, number: int, *conditions: ColumnElement[bool], end: JobEnd, ttl_s: float, **values: Any
) -> JobEvent | None:
    """End a job, release its lease, and return the event; None if the job no longer meets the conditions."""
    event = now(end.status, end.message)
    is_changed = change(
        session,
        number,
        *conditions,
        events=[event],
        finished_at=event.time,
        expires_at=case((JobRow.removed.is_(True), _AT_ONCE), else_=event.time + ttl_s),
        code=None if end.code is None else str(end.code),
        message=storable(end.message),
        result_bytes=end.result_bytes,
        lease_by=None,
        lease_until=None,
        **values,
    )
    return event if is_changed else None


def add_events(session: Session, number: int, num_before: int, events: Sequence[JobEvent]) -> None:
    """Insert events; ``num_before`` is the number of events that the job already has."""
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
    """Return the size that events are counted as; the message of an end is also stored with the job."""
    return sum(
        EVENT_BYTES + len((storable(event.message) or "").encode()) * (2 if event.status.is_final else 1)
        for event in events
    )


def now(status: JobStatus, message: str | None = None) -> JobEvent:
    return JobEvent(status=status, time=time.time(), message=message)


def storable(message: str | None) -> str | None:
    """Return a message that every database can store: no lone surrogates, no NUL, bounded length."""
    if message is None:
        return None
    text = printable(message).replace("\0", "\\x00")
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - len(_CUT)] + _CUT
