"""The record of a request, from which metrics, log and audit log are derived.

Prompts and code are never recorded; of code only the hash and the size.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import HTTPConnection

from api_schemas.interventions import Intervention
from api_schemas.operation_names import points_of_names
from api_schemas.operations import LogitLens, PointOperation
from api_schemas.request_traces import Trace
from app.auth.principal import Principal
from nnsight_engine.core.metering import UsageMeter

if TYPE_CHECKING:
    from nnsight_engine.remote_backend.messages import TraceRequest

CODE: Final = "code"
"""The kind of point of code, which may act at any point."""

SAMPLING: Final = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "seed", "n",
    "frequency_penalty", "presence_penalty", "stream",
)  # fmt: skip
"""The fields of a request that are recorded with their values."""

_MAX_NUMBER: Final = 2**63
_MAX_TEXT: Final = 200
_MAX_OPERATIONS: Final = 64
_SLOW_BYTES: Final = 2**20
_LAYER: Final = re.compile(r"^(vision\.)?layers\.[^.]*\.")
_ANY_LAYER: Final = r"\1layers.*."
_NAMED: Final = "named"
_LENS_POINT: Final = "layers.*.output"
_UNWRITTEN: Final = {"kept": False}
"""Marks fields without a column in the audit log."""


@dataclasses.dataclass(slots=True)
class Record:
    """See ``api_schemas.audit.AuditEntry`` for its columns.

    Attributes:
        caller_class: The tier of the caller's key; ``none`` without one.
        tier: How its steps ran, see ``WorkContext``; set when it is over, like ``marked``.
        salt: Isolates its part of the prefix cache; empty for no isolation, None if not applicable.
        named: The stored things that it uses: kind, and the name of a shared one; empty for a tenant's own.
        begun_s: When the last part of its body was received, by ``time.perf_counter``.
    """

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
    begun_s: float = dataclasses.field(default_factory=time.perf_counter, metadata=_UNWRITTEN)
    time: float = dataclasses.field(default_factory=time.time)
    request_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    trace_id: str = dataclasses.field(default="", metadata=_UNWRITTEN)
    caller_class: str = dataclasses.field(default="none", metadata=_UNWRITTEN)
    uses: list[tuple[str, str]] = dataclasses.field(default_factory=list, metadata=_UNWRITTEN)
    tier: str = dataclasses.field(default="", metadata=_UNWRITTEN)
    marked: list[str] = dataclasses.field(default_factory=list, metadata=_UNWRITTEN)
    salt: str | None = dataclasses.field(default=None, metadata=_UNWRITTEN)
    named: list[tuple[str, str]] = dataclasses.field(default_factory=list, metadata=_UNWRITTEN)
    sampling: dict[str, float] = dataclasses.field(default_factory=dict, metadata=_UNWRITTEN)

    def add_use(self, meter: UsageMeter) -> None:
        self.tokens, self.captured_bytes = meter.num_tokens, meter.captured_bytes
        self.intervention_s = meter.intervention_s

    def identify(self, caller: Principal, connection: HTTPConnection) -> None:
        self.tenant, self.key_id = caller.tenant, caller.key_id
        if caller.has_key:
            self.caller_class = caller.tier.value
        self.route = connection.scope["route"].path
        self.subject = next(map(str, connection.path_params.values()), "")

    def note_operations(self, body: Mapping[str, Any], interventions: Sequence[Intervention]) -> None:
        model = body.get("model")
        self.model = model if isinstance(model, str) else ""
        self.sampling = {
            name: value
            for name in SAMPLING
            if isinstance(value := body.get(name), int | float) and abs(value) < _MAX_NUMBER
        }
        written: list[str] = [operation.op for operation in interventions]
        self.operations = written if len(written) <= _MAX_OPERATIONS else list(dict.fromkeys(written))
        self.uses = [(operation.op, kind) for operation in interventions for kind in _points(operation)]
        for operation in interventions:
            if isinstance(operation, Trace):
                code = (operation.code or operation.block or "").encode("utf-8", "surrogatepass")
                self.code_sha256, self.code_bytes = hashlib.sha256(code).hexdigest(), len(code)

    def note_named(self, kind: str, name: str, *, shared: bool) -> None:
        """Record a stored thing that the operations name; a tenant's own names are not for its operator."""
        self.named.append((kind, name if shared or not self.tenant else ""))

    async def note_trace(self, request: TraceRequest) -> None:
        self.model, self.operations = request.head.model, [request.head.kind]
        self.uses = [(request.head.kind, CODE)]
        self.code_bytes = len(request.blocks)
        if self.code_bytes < _SLOW_BYTES:
            self.code_sha256 = hashlib.sha256(request.blocks).hexdigest()
        else:
            self.code_sha256 = (await asyncio.to_thread(hashlib.sha256, request.blocks)).hexdigest()

    def row(self) -> dict[str, Any]:
        written = [field.name for field in dataclasses.fields(self) if field.metadata.get("kept", True)]
        row = {name: getattr(self, name) for name in written}
        return row | {name: _storable(row[name]) for name in ("subject", "model", "error", "route")}


def _points(operation: Intervention) -> set[str]:
    if isinstance(operation, Trace):
        return {CODE}
    if isinstance(operation, LogitLens):
        return {_LENS_POINT}
    if isinstance(operation, PointOperation):
        patterns = [operation.at] if isinstance(operation.at, str) else operation.at
    else:
        # The points of detectors and dictionaries are known once their names are resolved.
        patterns = points_of_names(operation) or [_NAMED]
    return {_LAYER.sub(_ANY_LAYER, pattern) for pattern in patterns}


def _storable(text: str) -> str:
    return text[:_MAX_TEXT].encode("utf-8", "replace").decode().replace("\0", "")


__all__ = ["CODE", "SAMPLING", "Record"]
