"""The schemas of the audit log: which caller ran or changed something."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class AuditEntry(BaseModel):
    """One recorded action. It contains no prompts, answers or code.

    Attributes:
        number: Counts up; the order in which entries were written.
        time: When it began, in seconds since 1970.
        tenant: Who did it; empty for a command on the server's machine.
        key_id: With which key; empty for a command.
        request_id: The value of the response header `x-request-id`.
        method: Of the request; `RUN` for a job that was run, `CLI` for a command.
        route: Of the request, like `/v1/jobs/{job_id}`; or the command.
        subject: The job, key or tenant that it was about.
        model: As the request named it.
        operations: The request's operations, in order; or the kind of a trace.
        code_sha256: Of code, as it was sent: a trace's message of its blocks, or an operation's text.
        code_bytes: Its size.
        status: The answer's; null if there was none.
        error: Its code, also where it came after the status; `client_left` where nobody waited for the end,
            `under_way` until there is one.
        tokens: Of prompts, and generated; null where the request generates none.
        captured_bytes: Of captures and saves; null likewise.
        intervention_s: How long its operations and blocks had the engine to themselves; null likewise.
        request_bytes: Of the request's body, as far as it was read.
        response_bytes: Of the answer's.
        duration_s: From the request to the last byte of its answer.
        details: The changed properties, for keys.
    """

    model_config = ConfigDict(from_attributes=True)

    number: int
    time: float
    tenant: str
    key_id: str
    request_id: str
    method: str
    route: str
    subject: str
    model: str
    operations: list[str]
    code_sha256: str
    code_bytes: int
    status: int | None
    error: str
    tokens: int | None
    captured_bytes: int | None
    intervention_s: float | None
    request_bytes: int
    response_bytes: int
    duration_s: float
    details: dict[str, Any]


class AuditPage(BaseModel):
    """A page of the audit log, the newest entries first.

    Attributes:
        object: Always ``list``.
        data: The entries.
        last_number: The last one's: the next page comes ``after`` it.
        has_more: Whether there is a next page.
    """

    object: Literal["list"] = "list"
    data: list[AuditEntry]
    last_number: int | None = None
    has_more: bool


__all__ = ["AuditEntry", "AuditPage"]
