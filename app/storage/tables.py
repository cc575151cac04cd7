"""The database's tables; each change requires a migration, and a test compares the two.

Times are seconds since 1970. Text has neither NUL nor lone surrogates, which not every database can store:
``database`` ensures that for text, and code that writes JSON for JSON.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from app.limits.limit import Holder

# SQLite increments automatically only columns declared as INTEGER.
_COUNTER: Final = BigInteger().with_variant(Integer, "sqlite")
# Names that are the same on every database, so that later migrations can refer to them.
_NAMES: Final = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=_NAMES)
    # Single precision would make times minutes off.
    type_annotation_map: ClassVar[dict[Any, Any]] = {float: Double()}


JOB_BYTES: Final = 8 * 1024
"""The space of a job beside its files and events: a folder, disk blocks, rows."""


class JobRow(Base):
    """A job.

    Attributes:
        number: The order in which jobs were accepted, never reused.
        id: Unguessable.
        key_id: The key that last submitted or reran it; empty, like ``owner``, without keys.
        model: The server's name of the model; only servers of that model run it.
        status: Always that of the last event that is not a ``LOG``.
        head: The request for lists and logs, see ``JobSummary``.
        queued_at: The order in which jobs of one owner run.
        expires_at: When it and its files are removed; None until it has ended.
        digest: The SHA-256 of the request, in hexadecimal.
        result_bytes: None if there is no result; a result file is then partial.
        event_bytes: The size of its events, see ``jobs.states``.
        attempt: The number of attempts, including the current one.
        num_interruptions: How often a server or its engine died while it held the job.
        reruns: Whether it is requeued automatically after the server died while it ran.
        removed: Whether it is hidden from clients, and expires when it ends.
        lease_until: By the holder's clock; other servers only compare it with its previous value.
        traceparent: W3C, of the request that last submitted or reran it.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("owner", "idempotency_key"),
        Index(None, "status", "model", "queued_at"),
        Index(None, "owner", "number"),
        Index(None, "expires_at"),
        Index(None, "lease_by"),
        {"sqlite_autoincrement": True},
    )

    number: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    owner: Mapped[str] = mapped_column(String(255))
    model: Mapped[str] = mapped_column(String(1024))
    status: Mapped[str] = mapped_column(String(16))
    engine: Mapped[str | None] = mapped_column(String(32))
    head: Mapped[dict[str, Any]] = mapped_column(JSON)
    message: Mapped[str | None] = mapped_column(Text)
    code: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[float]
    queued_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    expires_at: Mapped[float | None]
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    digest: Mapped[str] = mapped_column(String(64))
    request_bytes: Mapped[int] = mapped_column(BigInteger)
    result_bytes: Mapped[int | None] = mapped_column(BigInteger)
    event_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    attempt: Mapped[int] = mapped_column(default=0)
    num_interruptions: Mapped[int] = mapped_column(default=0)
    num_events: Mapped[int] = mapped_column(default=0)
    reruns: Mapped[bool] = mapped_column(default=False)
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    removed: Mapped[bool] = mapped_column(default=False)
    lease_by: Mapped[str | None] = mapped_column(String(64))
    lease_until: Mapped[float | None]
    key_id: Mapped[str] = mapped_column(String(32), default="")
    traceparent: Mapped[str] = mapped_column(String(64), default="")

    @property
    def holder(self) -> Holder:
        return Holder(self.owner, self.key_id)

    @property
    def request(self) -> dict[str, Any]:
        return self.head

    @property
    def error(self) -> dict[str, str] | None:
        return None if self.code is None else {"code": self.code, "message": self.message or ""}

    @property
    def num_bytes(self) -> int:
        return self.request_bytes + (self.result_bytes or 0) + self.event_bytes + JOB_BYTES


class EventRow(Base):
    """An event of a job; ``seq`` counts from 1 without gaps."""

    __tablename__ = "job_events"

    job_number: Mapped[int] = mapped_column(
        _COUNTER, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True
    )
    seq: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(16))
    time: Mapped[float]
    message: Mapped[str | None] = mapped_column(Text)
    engine: Mapped[str | None] = mapped_column(String(32))


class TenantRow(Base):
    """A tenant; ``limits`` are those of all of its keys together, see ``api_schemas.administration``."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    limits: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[float]


class KeyRow(Base):
    """A key; see ``api_schemas.administration.Key``. Only ``hash`` is stored, never the secret."""

    __tablename__ = "keys"
    __table_args__ = (Index(None, "tenant"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), ForeignKey("tenants.name"))
    name: Mapped[str] = mapped_column(String(255))
    hash: Mapped[str] = mapped_column(String(255))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    tier: Mapped[str] = mapped_column(String(16))
    limits: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    replaces: Mapped[str | None] = mapped_column(String(32))
    trusted_codecs: Mapped[bool] = mapped_column(default=False)
    presets: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))


class AuditRow(Base):
    """See ``api_schemas.administration.AuditEntry``."""

    __tablename__ = "audit"
    __table_args__ = (
        Index(None, "tenant", "number"),
        Index(None, "key_id", "number"),
        Index(None, "time"),
        {"sqlite_autoincrement": True},
    )

    number: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    time: Mapped[float]
    tenant: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str] = mapped_column(String(32))
    request_id: Mapped[str] = mapped_column(String(64))
    method: Mapped[str] = mapped_column(String(16))
    route: Mapped[str] = mapped_column(String(255))
    subject: Mapped[str] = mapped_column(String(255))
    model: Mapped[str] = mapped_column(String(255))
    operations: Mapped[list[str]] = mapped_column(JSON)
    code_sha256: Mapped[str] = mapped_column(String(64))
    code_bytes: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[int | None]
    error: Mapped[str] = mapped_column(String(255))
    tokens: Mapped[int | None] = mapped_column(BigInteger)
    captured_bytes: Mapped[int | None] = mapped_column(BigInteger)
    intervention_s: Mapped[float | None]
    request_bytes: Mapped[int] = mapped_column(BigInteger)
    response_bytes: Mapped[int] = mapped_column(BigInteger)
    duration_s: Mapped[float]
    details: Mapped[dict[str, Any]] = mapped_column(JSON)


class StoredNameRow(Base):
    """A tenant's name for versions; retained after those are removed, so that none is reused.

    Once ``shared``, it refers to this tenant's versions for all tenants that never used the name themselves.
    """

    __tablename__ = "stored_names"

    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    versions: Mapped[int] = mapped_column(default=0)
    shared: Mapped[bool] = mapped_column(default=False)


class VersionRow(Base):
    """A version of a name, see ``storage.versions``; ``data`` is loaded only where it is asked for.

    ``head`` and ``data`` are what ``app.catalog`` makes of its kind. ``num_bytes`` includes the labels of a
    dictionary, the only part of a version that can change, and its weights, whose file ``sha256`` names.
    """

    __tablename__ = "stored_versions"
    __table_args__ = (
        UniqueConstraint("kind", "tenant", "name", "version"),
        Index(None, "kind", "name", "shared"),
        Index(None, "kind", "number"),
        {"sqlite_autoincrement": True},
    )

    number: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    kind: Mapped[str] = mapped_column(String(16))
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(64))
    version: Mapped[int]
    model: Mapped[str] = mapped_column(String(1024))
    shared: Mapped[bool]
    sha256: Mapped[str] = mapped_column(String(64))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]
    head: Mapped[dict[str, Any]] = mapped_column(JSON)
    data: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)


class FeatureLabelRow(Base):
    """The label of a feature; ``folded`` is without case, for searches."""

    __tablename__ = "feature_labels"
    __table_args__ = (Index(None, "dictionary", "text"),)

    dictionary: Mapped[int] = mapped_column(
        _COUNTER, ForeignKey("stored_versions.number", ondelete="CASCADE"), primary_key=True
    )
    feature: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    text: Mapped[str] = mapped_column(String(500))
    folded: Mapped[str] = mapped_column(Text)
