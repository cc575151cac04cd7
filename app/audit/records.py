"""What is written down of a request, and how those who serve it add to that.

The middleware makes a record for each request that may run or change something, and puts it into the context;
whoever learns something on the way notes it there. Neither prompts nor code are ever noted: of code its hash
and size. Without keys nobody knows who runs what, and there are no records.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import HTTPConnection

from api_schemas.interventions import Intervention
from api_schemas.request_traces import Trace
from app.auth.principal import Principal
from nnsight_engine.core.metering import Meter

if TYPE_CHECKING:
    from nnsight_engine.remote_backend.messages import TraceRequest

_MAX_TEXT: Final = 200
_SLOW_BYTES: Final = 2**20


@dataclasses.dataclass(slots=True)
class Record:
    """Something that was done; see ``api_schemas.audit.AuditEntry`` for the attributes."""

    method: str
    route: str = ""
    tenant: str = ""
    key_id: str = ""
    subject: str = ""
    model: str = ""
    operations: list[str] = dataclasses.field(default_factory=list)
    code_sha256: str = ""
    code_bytes: int = 0
    status: int | None = None
    error: str = ""
    tokens: int | None = None
    captured_bytes: int | None = None
    intervention_s: float | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    duration_s: float = 0.0
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    time: float = dataclasses.field(default_factory=time.time)
    request_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))

    def add_use(self, meter: Meter | None) -> None:
        """Take what the request has used, if that was counted."""
        if meter is not None:
            self.tokens, self.captured_bytes = meter.num_tokens, meter.captured_bytes
            self.intervention_s = meter.intervention_s

    def row(self) -> dict[str, Any]:
        """Return what a database is given."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return row | {name: _storable(row[name]) for name in ("subject", "model", "error", "route")}


RECORD: Final[ContextVar[Record | None]] = ContextVar("nnsight_engine_record", default=None)
"""The record of the request on whose behalf this runs."""


def note(**known: Any) -> None:
    """Note attributes of the record, where there is one."""
    record = RECORD.get()
    if record is not None:
        for name, value in known.items():
            setattr(record, name, value)


def note_caller(caller: Principal, connection: HTTPConnection) -> None:
    """Note who sends a request, and which route it is for."""
    record = RECORD.get()
    if record is not None:
        record.tenant, record.key_id = caller.tenant, caller.key_id
        record.route = connection.scope["route"].path
        record.subject = next(map(str, connection.path_params.values()), "")


def note_operations(model: object, interventions: Sequence[Intervention]) -> None:
    """Note what a completion does."""
    record = RECORD.get()
    if record is None:
        return
    record.model = model if isinstance(model, str) else ""
    record.operations = [operation.op for operation in interventions]
    for operation in interventions:
        if isinstance(operation, Trace):
            code = (operation.code or operation.block or "").encode("utf-8", "surrogatepass")
            record.code_sha256, record.code_bytes = hashlib.sha256(code).hexdigest(), len(code)


def note_refusal(body: object) -> None:
    """Note why the engine's own server refused a request, if it did."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        note(error=str(error.get("type") or error.get("code") or ""))


async def note_trace(request: TraceRequest, record: Record | None = None) -> None:
    """Note what a trace is of, in the record given or in the request's."""
    record = record or RECORD.get()
    if record is None:
        return
    record.model, record.operations = request.head.model, [request.head.kind]
    record.code_bytes = len(request.blocks)
    if record.code_bytes < _SLOW_BYTES:
        record.code_sha256 = hashlib.sha256(request.blocks).hexdigest()
    else:
        record.code_sha256 = (await asyncio.to_thread(hashlib.sha256, request.blocks)).hexdigest()


def _storable(text: str) -> str:
    """Return text that every database can keep, whatever a client has sent."""
    return text[:_MAX_TEXT].encode("utf-8", "replace").decode().replace("\0", "")


__all__ = [
    "RECORD",
    "Record",
    "note",
    "note_caller",
    "note_operations",
    "note_refusal",
    "note_trace",
]
