"""The database's tables, as this version of the server sees them.

A change here needs a migration beside it; a test compares the two. Times are seconds since 1970, statuses
are those of ``api_schemas.jobs``. Text holds neither NUL nor lone surrogates, which not every database can
store: ``engines`` sees to that, and whoever writes something as JSON.
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

from app.storage.storage_usage import Holder

# SQLite counts up by itself only what is declared as its plain INTEGER.
_COUNTER: Final = BigInteger().with_variant(Integer, "sqlite")
# Names that every database agrees on, so that later migrations can refer to them.
_NAMES: Final = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """What all tables share."""

    metadata = MetaData(naming_convention=_NAMES)
    # A time in single precision would be minutes off.
    type_annotation_map: ClassVar[dict[Any, Any]] = {float: Double()}


class JobRow(Base):
    """A job.

    Attributes:
        number: Counts up, never used twice: the order in which jobs came.
        id: Cannot be guessed.
        owner: The tenant whose it is; empty as long as there are no keys.
        key_id: The key that let it run last; empty likewise.
        model: The server's name of the model; only servers of that model run it.
        status: A ``JobStatus``; always that of the last event that is not a ``LOG``.
        engine: What runs it, once that is known.
        head: What lists and logs tell of the request, see ``JobSummary``.
        message: Why it failed.
        code: The same for programs, an error code.
        created_at: When it was accepted.
        queued_at: When it began to wait; the order in which jobs of one owner run.
        started_at: When its blocks began to run.
        finished_at: When it ended.
        expires_at: When it and its files go; None until it has ended.
        idempotency_key: The client's name for the request, its owner's own.
        digest: SHA-256 of the request, hexadecimal.
        request_bytes: Size of the request.
        result_bytes: Size of the result; None where there is none. A file of a job without it is not whole.
        event_bytes: Size of its events, what its blocks printed above all, see ``job_states``.
        attempt: How often it was begun.
        num_interruptions: How often the server died while it ran.
        num_events: How many events it has; the number of the last one.
        reruns: Whether it runs again by itself when the server died while it ran.
        cancel_requested: Whether whoever runs it is to end it.
        removed: Whether it is gone for clients, and goes when it has ended.
        lease_by: The server process that runs it.
        lease_until: When it thinks that this is over unless it says otherwise; others see that it changes.
        traceparent: Of the request that let it run last, for a collector of traces; empty if there is none.
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
        """Whose its files are."""
        return Holder(self.owner, self.key_id)


class EventRow(Base):
    """Something that happened to a job; ``seq`` counts from 1 without gaps."""

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
    """Who shares the server: whose keys, jobs and results are kept apart from others'.

    Attributes:
        name: What operators call it.
        limits: For all of its keys together, see ``api_schemas.keys.Limits``.
        created_at: When its first key was made.
    """

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    limits: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[float]


class KeyRow(Base):
    """A key; see ``api_schemas.keys.Key``. ``hash`` is all that is kept of what opens anything."""

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


class AuditRow(Base):
    """Something that was done; see ``api_schemas.audit.AuditEntry``."""

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


class VectorNameRow(Base):
    """A tenant's name for vectors, which stays when they are gone: no version comes back as another.

    Attributes:
        versions: How many were ever made.
        shared: Whether one was ever shared: then the name is this tenant's for all who have none of it.
    """

    __tablename__ = "vector_names"

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    versions: Mapped[int] = mapped_column(default=0)
    shared: Mapped[bool] = mapped_column(default=False)


class VectorRow(Base):
    """A vector; see ``api_schemas.vectors.Vector``.

    Attributes:
        number: Counts up, never used twice: the order in which vectors came.
        tenant: Whose it is; empty as long as there are no keys.
        leaf: The kind of points that it belongs to, ``output`` of a layer.
        layers: The layers of the rows, ascending.
        data: The rows, ``[layers, width]``, float32 and little-endian; read only where it is asked for.
    """

    __tablename__ = "vectors"
    __table_args__ = (
        UniqueConstraint("tenant", "name", "version"),
        Index(None, "name", "shared"),
        {"sqlite_autoincrement": True},
    )

    number: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(64))
    version: Mapped[int]
    model: Mapped[str] = mapped_column(String(1024))
    leaf: Mapped[str] = mapped_column(String(128))
    layers: Mapped[list[int]] = mapped_column(JSON)
    width: Mapped[int]
    shared: Mapped[bool]
    format: Mapped[str] = mapped_column(String(16))
    source_sha256: Mapped[str | None] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(String(64))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]
    training: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    data: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)


__all__ = ["AuditRow", "Base", "EventRow", "JobRow", "KeyRow", "TenantRow", "VectorNameRow", "VectorRow"]
