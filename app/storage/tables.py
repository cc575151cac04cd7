"""The database's tables in this version of the server.

Each change here requires a migration; a test compares the two. Times are seconds since 1970, statuses are
those of ``api_schemas.jobs``. Text must contain neither NUL nor lone surrogates, which not every database can
store: ``engines`` ensures that for text, and code that writes JSON ensures it for JSON.
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
from sqlalchemy.orm import DeclarativeBase, Mapped, declared_attr, mapped_column

from app.storage.storage_usage import Holder

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
    """The base class of all tables."""

    metadata = MetaData(naming_convention=_NAMES)
    # Single precision would make times minutes off.
    type_annotation_map: ClassVar[dict[Any, Any]] = {float: Double()}


class JobRow(Base):
    """A job.

    Attributes:
        number: Increases and is never reused: the order in which jobs were accepted.
        id: An unguessable id.
        owner: The tenant; empty on a server without keys.
        key_id: The key that last submitted or reran it; empty on a server without keys.
        model: The server's name of the model; only servers of that model run it.
        status: A ``JobStatus``; always that of the last event that is not a ``LOG``.
        engine: The engine that runs it, once known.
        head: The description of the request for lists and logs, see ``JobSummary``.
        message: Why it failed.
        code: The error code of the failure.
        created_at: When it was accepted.
        queued_at: When it was queued; the order in which jobs of one owner run.
        started_at: When its blocks began to run.
        finished_at: When it ended.
        expires_at: When it and its files are removed; None until it has ended.
        idempotency_key: The client's key for the request, unique per owner.
        digest: The SHA-256 of the request, in hexadecimal.
        request_bytes: The size of the request.
        result_bytes: The size of the result; None if there is none, in which case a result file is partial.
        event_bytes: The size of its events, mostly printed output, see ``jobs.states``.
        attempt: The number of attempts, including the current one.
        num_interruptions: How often a server or its engine died while it held the job.
        num_events: The number of events, which is also the number of the last one.
        reruns: Whether it is requeued automatically after the server died while it ran.
        cancel_requested: Whether its cancellation was requested.
        removed: Whether it is hidden from clients, to be removed after its end.
        lease_by: The server process that runs it.
        lease_until: The end of the lease by the holder's clock, changed at each renewal; other servers only
            compare it with its previous value.
        traceparent: The W3C ``traceparent`` of the request that last submitted or reran it; empty if none.
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
        """The owner that its files are counted for."""
        return Holder(self.owner, self.key_id)


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
    """A tenant, whose keys, jobs and results are isolated from those of other tenants.

    Attributes:
        name: The operator's name for it.
        limits: The limits of all of its keys together, see ``api_schemas.keys.Limits``.
        created_at: When its first key was created.
    """

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    limits: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[float]


class KeyRow(Base):
    """A key; see ``api_schemas.keys.Key``. Only ``hash`` is stored, never the secret."""

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
    """An audited action; see ``api_schemas.audit.AuditEntry``."""

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
    """A tenant's name for what is kept in versions; retained after those are removed, so that none is reused.

    Attributes:
        versions: The number of versions ever created.
        shared: Whether a version was ever shared; the name then refers to this tenant's versions for all
            tenants that have never used the name themselves.
    """

    __abstract__ = True

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    versions: Mapped[int] = mapped_column(default=0)
    shared: Mapped[bool] = mapped_column(default=False)


class VersionRow(Base):
    """A version of a name, which never changes.

    Attributes:
        number: Increases and is never reused: the order in which versions were created.
        tenant: The tenant; empty on a server without keys.
        model: The server's name of the model that it is for.
        shared: Whether every tenant may use it.
        num_bytes: The bytes that it is counted with.
        data: Its content; loaded only on access.
    """

    __abstract__ = True

    number: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(64))
    version: Mapped[int]
    model: Mapped[str] = mapped_column(String(1024))
    shared: Mapped[bool]
    sha256: Mapped[str] = mapped_column(String(64))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]
    data: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        """Return the indexes, the same for each table."""
        return (
            UniqueConstraint("tenant", "name", "version"),
            Index(None, "name", "shared"),
            {"sqlite_autoincrement": True},
        )


class VectorNameRow(StoredNameRow):
    """A tenant's name for vectors."""

    __tablename__ = "vector_names"


class VectorRow(VersionRow):
    """A vector; see ``api_schemas.vectors.Vector``.

    ``data`` is rows, ``[layers, width]``, float32 and little-endian.

    Attributes:
        leaf: The kind of points that it applies to, such as ``output`` of a layer.
        layers: The layers of the rows, ascending.
    """

    __tablename__ = "vectors"

    leaf: Mapped[str] = mapped_column(String(128))
    layers: Mapped[list[int]] = mapped_column(JSON)
    width: Mapped[int]
    format: Mapped[str] = mapped_column(String(16))
    source_sha256: Mapped[str | None] = mapped_column(String(64))
    training: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class DetectorNameRow(StoredNameRow):
    """A tenant's name for detectors."""

    __tablename__ = "detector_names"


class DetectorRow(VersionRow):
    """A detector; see ``api_schemas.detectors.Detector``.

    ``data`` is its file: safetensors with its head, see ``app.detectors.files``.

    Attributes:
        head: What of its description is in the file too: parts with their sizes, bias, link, threshold,
            calibration.
    """

    __tablename__ = "detectors"

    head: Mapped[dict[str, Any]] = mapped_column(JSON)
    format: Mapped[str] = mapped_column(String(16))
    source_sha256: Mapped[str | None] = mapped_column(String(64))
    training: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class DictionaryNameRow(StoredNameRow):
    """A tenant's name for dictionaries."""

    __tablename__ = "dictionary_names"


class DictionaryRow(VersionRow):
    """A dictionary; see ``api_schemas.dictionaries.Dictionary``.

    ``data`` is its ``cfg.json`` as it was received, ``sha256`` that of the file of its weights, which also
    names the file. ``num_bytes`` includes its labels, the only part that can change.

    Attributes:
        at: The point that it reads.
        output_at: The point whose value a transcoder reconstructs.
        architecture: SAELens' name of its architecture.
        dtype: The dtype of its weights.
        weights_bytes: The size of the file of its weights.
        num_labels: The number of its labels.
    """

    __tablename__ = "dictionaries"

    at: Mapped[str] = mapped_column(String(128))
    output_at: Mapped[str | None] = mapped_column(String(128))
    architecture: Mapped[str] = mapped_column(String(32))
    input_width: Mapped[int]
    output_width: Mapped[int]
    num_features: Mapped[int]
    dtype: Mapped[str] = mapped_column(String(16))
    weights_bytes: Mapped[int] = mapped_column(BigInteger)
    num_labels: Mapped[int] = mapped_column(default=0)


class FeatureLabelRow(Base):
    """The label of a feature of a dictionary.

    Attributes:
        dictionary: ``DictionaryRow.number``.
        feature: The feature, counted from 0.
        text: The label.
        folded: The label without case, for searches.
    """

    __tablename__ = "feature_labels"
    __table_args__ = (Index(None, "dictionary", "text"),)

    dictionary: Mapped[int] = mapped_column(
        _COUNTER, ForeignKey("dictionaries.number", ondelete="CASCADE"), primary_key=True
    )
    feature: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    text: Mapped[str] = mapped_column(String(500))
    folded: Mapped[str] = mapped_column(Text)


class PresetNameRow(StoredNameRow):
    """A tenant's name for presets."""

    __tablename__ = "preset_names"


class PresetRow(VersionRow):
    """A preset; see ``api_schemas.presets.Preset``. ``data`` is its operations as JSON.

    Attributes:
        operations: The kinds of its operations, each once.
    """

    __tablename__ = "presets"

    description: Mapped[str] = mapped_column(Text)
    operations: Mapped[list[str]] = mapped_column(JSON)


__all__ = [
    "AuditRow", "Base", "DetectorNameRow", "DetectorRow", "DictionaryNameRow", "DictionaryRow", "EventRow",
    "FeatureLabelRow", "JobRow", "KeyRow", "PresetNameRow", "PresetRow", "StoredNameRow", "TenantRow",
    "VectorNameRow", "VectorRow", "VersionRow",
]  # fmt: skip
