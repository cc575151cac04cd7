"""The schemas of the audit log: which caller ran or changed something."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class AuditEntry(BaseModel):
    """One recorded action. It contains no prompts, answers or code.

    Attributes:
        number: The entry's number in the log; entries are numbered in the order in which they were written.
        time: The start of the action, in seconds since 1970.
        tenant: The caller's tenant; empty for a command on the server's machine.
        key_id: The caller's key; empty for a command.
        request_id: The value of the response header `x-request-id`.
        method: The method of the request; `RUN` for a job that was run, `CLI` for a command.
        route: The route of the request, such as `/v1/jobs/{job_id}`, or the command.
        subject: The id of the affected job or key, or the name of the tenant.
        model: The model, as named in the request.
        operations: The request's operations, in order; or the kind of a trace.
        code_sha256: SHA-256 of the code as sent: the message of a trace, or the text of an operation.
        code_bytes: The size of that code.
        status: The HTTP status of the response; null if there was none.
        error: The error code, also of an error after the status was sent; `client_left` if the client
            disconnected before the end, `under_way` while the request runs.
        tokens: The number of prompt tokens and generated tokens; null if the request generates none.
        captured_bytes: The bytes of captured and saved values; null if the request generates no tokens.
        intervention_s: The seconds during which its operations and blocks had the engine to themselves; null
            if the request generates no tokens.
        request_bytes: The number of bytes that were read of the request's body.
        response_bytes: The number of bytes of the response's body.
        duration_s: The time from the request to the last byte of the response.
        details: The changed properties, for changes of keys and tenants.
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
        last_number: The number of the last entry; pass it as ``after`` for the next page.
        has_more: Whether there is a next page.
    """

    object: Literal["list"] = "list"
    data: list[AuditEntry]
    last_number: int | None = None
    has_more: bool


__all__ = ["AuditEntry", "AuditPage"]
