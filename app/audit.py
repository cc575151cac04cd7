"""The record of a request, from which metrics and logs are made, and the writer of the audit log.

Prompts and code are never recorded; of code only the hash and the size. Records are written
asynchronously, with a bounded queue, about one transaction per second; beyond the queue's limit, the
number of lost ones is recorded. A request that runs for longer is written before its end, so that a crash
does not lose the record of the request that may have caused it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import HTTPConnection

from api_schemas.administration import Key, Tenant
from api_schemas.interventions import Intervention
from api_schemas.operation_names import points_of_names
from api_schemas.operations import LogitLens, PointOperation, Trace
from app.auth.principal import Principal
from app.storage.audit import AuditStore
from nnsight_engine.core.work_context import UsageMeter

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
    """See ``api_schemas.administration.AuditEntry`` for its columns.

    Attributes:
        caller_class: The tier of the caller's key; ``none`` without one.
        step_tier: How its steps ran, see ``WorkContext.tier``; set when it is over, like ``marked``.
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
    step_tier: str = dataclasses.field(default="", metadata=_UNWRITTEN)
    marked: list[str] = dataclasses.field(default_factory=list, metadata=_UNWRITTEN)
    salt: str | None = dataclasses.field(default=None, metadata=_UNWRITTEN)
    named: list[tuple[str, str]] = dataclasses.field(default_factory=list, metadata=_UNWRITTEN)
    sampling: dict[str, float] = dataclasses.field(default_factory=dict, metadata=_UNWRITTEN)

    def add_use(self, meter: UsageMeter) -> None:
        self.tokens, self.captured_bytes = meter.num_tokens, meter.captured_bytes
        self.intervention_s = meter.intervention_s

    def identify(self, caller: Principal, connection: HTTPConnection) -> None:
        """Record the caller, the route, and as the subject the first parameter of its path."""
        self.tenant, self.key_id = caller.tenant, caller.key_id
        if caller.has_key:
            self.caller_class = caller.tier.value
        self.route = connection.scope["route"].path
        self.subject = next(map(str, connection.path_params.values()), "")

    def note_operations(self, body: Mapping[str, Any], interventions: Sequence[Intervention]) -> None:
        """Record what a completion asks for; ``body`` has its model and its sampling parameters."""
        model = body.get("model")
        self.model = model if isinstance(model, str) else ""
        self.sampling = {
            name: value
            for name in SAMPLING
            if isinstance(value := body.get(name), int | float) and abs(value) < _MAX_NUMBER
        }
        op_names: list[str] = [operation.op for operation in interventions]
        self.operations = op_names if len(op_names) <= _MAX_OPERATIONS else list(dict.fromkeys(op_names))
        self.uses = [
            (operation.op, kind) for operation in interventions for kind in _kinds_of_points(operation)
        ]
        for operation in interventions:
            if isinstance(operation, Trace):
                code = (operation.code or operation.block or "").encode("utf-8", "surrogatepass")
                self.code_sha256, self.code_bytes = hashlib.sha256(code).hexdigest(), len(code)

    def note_named(self, kind: str, name: str, *, shared: bool) -> None:
        """Record a stored thing that the operations name; a tenant's own names are not for its operator."""
        self.named.append((kind, name if shared or not self.tenant else ""))

    async def note_trace(self, request: TraceRequest) -> None:
        """Record what a trace runs; large code is hashed on a thread."""
        self.model, self.operations = request.head.model, [request.head.kind]
        self.uses = [(request.head.kind, CODE)]
        self.code_bytes = len(request.blocks)
        if self.code_bytes < _SLOW_BYTES:
            self.code_sha256 = hashlib.sha256(request.blocks).hexdigest()
        else:
            self.code_sha256 = (await asyncio.to_thread(hashlib.sha256, request.blocks)).hexdigest()

    def row(self) -> dict[str, Any]:
        """Return the columns of the audit log, with texts that any database stores."""
        columns = [field.name for field in dataclasses.fields(self) if field.metadata.get("kept", True)]
        row = {name: getattr(self, name) for name in columns}
        return row | {name: _storable(row[name]) for name in ("subject", "model", "error", "route")}


def _kinds_of_points(operation: Intervention) -> set[str]:
    """Return the points of an operation as names of points of all layers, such as ``layers.*.output``."""
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


_OF_KEYS: Final = {"id", "tenant", "name", "scopes", "tier", "limits", "expires_at", "replaces", "presets"}
_OF_TENANTS: Final = {"name", "limits"}


def changed(thing: Key | Tenant) -> dict[str, Any]:
    """Return the current state of a key or a tenant, without secrets."""
    names = _OF_KEYS if isinstance(thing, Key) else _OF_TENANTS
    return thing.model_dump(mode="json", include=names, exclude_none=True)


def command_record(command: str, subject: str, thing: Key | Tenant) -> Record:
    """Return the record of a command, which needs no key; ``subject`` is empty for one that created a key."""
    default_subject = thing.id if isinstance(thing, Key) else thing.name
    return Record("CLI", route=command, subject=subject or default_subject, details=changed(thing))


logger = logging.getLogger(__name__)

_GATHER_S: Final = 1.0
_MAX_PENDING: Final = 20_000
_MAX_BATCH: Final = 1000
_RETRY_S: Final = 5.0
_SWEEP_S: Final = 3600.0
_UNDER_WAY: Final = "under_way"
_EARLY_COLUMNS: Final = ("tenant", "key_id", "route", "subject", "model", "operations", "code_sha256")
"""Attributes that are set while a request runs; changes of them are written before its end."""


@dataclasses.dataclass(slots=True)
class _AuditEntry:
    """``written_columns``: the values of ``_EARLY_COLUMNS`` when the row was last written before the end.

    ``number`` is that of the row in the database, None until it is written; a further write updates it.
    """

    record: Record
    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    number: int | None = None
    written_columns: tuple[Any, ...] | None = None

    def mutable_columns(self) -> tuple[Any, ...]:
        return tuple(getattr(self.record, name) for name in _EARLY_COLUMNS)


class AuditLog:
    """The audit records of one server; ``ttl_s`` of 0 disables the log."""

    def __init__(self, store: AuditStore, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._pending: list[_AuditEntry] = []
        self._running: dict[str, _AuditEntry] = {}
        self._num_lost = 0
        self._item_added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._flush_lock = asyncio.Lock()

    @property
    def is_on(self) -> bool:
        return self._ttl_s > 0

    def register(self, record: Record) -> None:
        """Register a request that begins; ``add`` or ``drop`` must follow."""
        if self.is_on:
            self._running[record.request_id] = _AuditEntry(record)
            self._item_added.set()

    def add(self, record: Record) -> None:
        """Queue the record of a request that is over; drops it if too many wait for the database."""
        if not self.is_on:
            return
        entry = self._running.pop(record.request_id, None) or _AuditEntry(record)
        # A written row is always updated: it would remain marked as unfinished.
        if len(self._pending) >= _MAX_PENDING and entry.written_columns is None:
            self._num_lost += 1
            return
        entry.row = record.row()
        self._pending.append(entry)
        self._item_added.set()

    def drop(self, record: Record) -> None:
        """Unregister a request that needs no record, unless it was written; no effect after ``add``."""
        entry = self._running.get(record.request_id)
        if entry is None:
            return
        if entry.written_columns is None:
            del self._running[record.request_id]
        else:
            self.add(record)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run_writer(), name="audit")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await self.flush()
        except Exception:
            logger.exception("%d audit records were lost", len(self._pending))

    async def flush(self) -> None:
        async with self._flush_lock:  # concurrent flushes would write the same records
            await self._flush()

    async def _flush(self) -> None:
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            record = Record("", route="lost", details={"records": lost})
            self._pending.append(_AuditEntry(record, record.row()))
        if started := [entry for entry in self._running.values() if _is_due(entry)]:
            await _uninterrupted(self._write_started(started))
        while batch := self._pending[:_MAX_BATCH]:
            await _uninterrupted(self._write_ended(batch))

    async def _write_started(self, entries: Sequence[_AuditEntry]) -> None:
        """Write running requests as under way; if that fails, they are due again."""
        for entry in entries:
            entry.written_columns = entry.mutable_columns()
            entry.row = entry.record.row() | {"error": entry.record.error or _UNDER_WAY}
        try:
            await self._write(entries)
        except BaseException:
            for entry in entries:
                entry.written_columns = None
            raise

    async def _write_ended(self, entries: Sequence[_AuditEntry]) -> None:
        await self._write(entries)
        del self._pending[: len(entries)]

    async def _write(self, entries: Sequence[_AuditEntry]) -> None:
        """Insert the rows of entries without a number, which get one, and update the others."""
        unwritten = [entry for entry in entries if entry.number is None]
        updated = [{**entry.row, "number": entry.number} for entry in entries if entry.number is not None]
        numbers = await self._store.write([entry.row for entry in unwritten], updated)
        for entry, number in zip(unwritten, numbers, strict=True):
            entry.number = number

    async def _run_writer(self) -> None:
        """Write records about once a second while there are any, and expire old ones every hour."""
        swept_at = -_SWEEP_S
        while True:
            try:
                if time.monotonic() - swept_at > _SWEEP_S:
                    swept_at = time.monotonic()
                    await self._store.expire(time.time() - self._ttl_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._item_added.wait(), _SWEEP_S)
                await asyncio.sleep(_GATHER_S)
                self._item_added.clear()
                await self.flush()
                if self._running:
                    self._item_added.set()
            except Exception:
                logger.exception("writing the audit log failed; retrying")
                self._item_added.set()
                await asyncio.sleep(_RETRY_S)


def _is_due(entry: _AuditEntry) -> bool:
    """Return whether a running request of a key is to be written now, before its end."""
    record = entry.record
    if not record.key_id or time.time() - record.time < _GATHER_S:
        return False
    return entry.written_columns != entry.mutable_columns()


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` to its end even when cancelled, so that no record is written twice."""
    writing = asyncio.ensure_future(work)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        raise
