"""All tables."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_COUNTER: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("number", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("route", sa.String(255), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("operations", sa.JSON(), nullable=False),
        sa.Column("code_sha256", sa.String(64), nullable=False),
        sa.Column("code_bytes", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Integer()),
        sa.Column("error", sa.String(255), nullable=False),
        sa.Column("tokens", sa.BigInteger()),
        sa.Column("captured_bytes", sa.BigInteger()),
        sa.Column("intervention_s", sa.Double()),
        sa.Column("request_bytes", sa.BigInteger(), nullable=False),
        sa.Column("response_bytes", sa.BigInteger(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_key_id_number", "audit", ["key_id", "number"])
    op.create_index("ix_audit_tenant_number", "audit", ["tenant", "number"])
    op.create_index("ix_audit_time", "audit", ["time"])
    op.create_table(
        "detector_names",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("versions", sa.Integer(), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name="pk_detector_names"),
    )
    op.create_table(
        "detectors",
        sa.Column("head", sa.JSON(), nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("source_sha256", sa.String(64)),
        sa.Column("training", sa.JSON(none_as_null=True)),
        sa.Column("number", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(1024), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_detectors"),
        sa.UniqueConstraint("id", name="uq_detectors_id"),
        sa.UniqueConstraint("tenant", "name", "version", name="uq_detectors_tenant_name_version"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_detectors_name_shared", "detectors", ["name", "shared"])
    op.create_table(
        "dictionaries",
        sa.Column("at", sa.String(128), nullable=False),
        sa.Column("output_at", sa.String(128)),
        sa.Column("architecture", sa.String(32), nullable=False),
        sa.Column("input_width", sa.Integer(), nullable=False),
        sa.Column("output_width", sa.Integer(), nullable=False),
        sa.Column("num_features", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("weights_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_labels", sa.Integer(), nullable=False),
        sa.Column("number", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(1024), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_dictionaries"),
        sa.UniqueConstraint("id", name="uq_dictionaries_id"),
        sa.UniqueConstraint("tenant", "name", "version", name="uq_dictionaries_tenant_name_version"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_dictionaries_name_shared", "dictionaries", ["name", "shared"])
    op.create_table(
        "dictionary_names",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("versions", sa.Integer(), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name="pk_dictionary_names"),
    )
    op.create_table(
        "jobs",
        sa.Column("number", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("model", sa.String(1024), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("engine", sa.String(32)),
        sa.Column("head", sa.JSON(), nullable=False),
        sa.Column("message", sa.Text()),
        sa.Column("code", sa.String(64)),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("finished_at", sa.Double()),
        sa.Column("expires_at", sa.Double()),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("request_bytes", sa.BigInteger(), nullable=False),
        sa.Column("result_bytes", sa.BigInteger()),
        sa.Column("event_bytes", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("num_interruptions", sa.Integer(), nullable=False),
        sa.Column("num_events", sa.Integer(), nullable=False),
        sa.Column("reruns", sa.Boolean(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("removed", sa.Boolean(), nullable=False),
        sa.Column("lease_by", sa.String(64)),
        sa.Column("lease_until", sa.Double()),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("traceparent", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("owner", "idempotency_key", name="uq_jobs_owner_idempotency_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_expires_at", "jobs", ["expires_at"])
    op.create_index("ix_jobs_lease_by", "jobs", ["lease_by"])
    op.create_index("ix_jobs_owner_number", "jobs", ["owner", "number"])
    op.create_index("ix_jobs_status_model_queued_at", "jobs", ["status", "model", "queued_at"])
    op.create_table(
        "preset_names",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("versions", sa.Integer(), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name="pk_preset_names"),
    )
    op.create_table(
        "presets",
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("operations", sa.JSON(), nullable=False),
        sa.Column("number", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(1024), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_presets"),
        sa.UniqueConstraint("id", name="uq_presets_id"),
        sa.UniqueConstraint("tenant", "name", "version", name="uq_presets_tenant_name_version"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_presets_name_shared", "presets", ["name", "shared"])
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )
    op.create_table(
        "vector_names",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("versions", sa.Integer(), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name="pk_vector_names"),
    )
    op.create_table(
        "vectors",
        sa.Column("leaf", sa.String(128), nullable=False),
        sa.Column("layers", sa.JSON(), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("source_sha256", sa.String(64)),
        sa.Column("training", sa.JSON(none_as_null=True)),
        sa.Column("number", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(1024), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_vectors"),
        sa.UniqueConstraint("id", name="uq_vectors_id"),
        sa.UniqueConstraint("tenant", "name", "version", name="uq_vectors_tenant_name_version"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_vectors_name_shared", "vectors", ["name", "shared"])
    op.create_table(
        "feature_labels",
        sa.Column("dictionary", _COUNTER, nullable=False),
        sa.Column("feature", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("text", sa.String(500), nullable=False),
        sa.Column("folded", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dictionary"], ["dictionaries.number"], name="fk_feature_labels_dictionary", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("dictionary", "feature", name="pk_feature_labels"),
    )
    op.create_index("ix_feature_labels_dictionary_text", "feature_labels", ["dictionary", "text"])
    op.create_table(
        "job_events",
        sa.Column("job_number", _COUNTER, nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("message", sa.Text()),
        sa.Column("engine", sa.String(32)),
        sa.ForeignKeyConstraint(
            ["job_number"], ["jobs.number"], name="fk_job_events_job_number", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_number", "seq", name="pk_job_events"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("hash", sa.String(255), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("tier", sa.String(16), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("last_used_at", sa.Double()),
        sa.Column("replaces", sa.String(32)),
        sa.Column("trusted_codecs", sa.Boolean(), nullable=False),
        sa.Column("presets", sa.JSON(none_as_null=True)),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_keys_tenant"),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
    )
    op.create_index("ix_keys_tenant", "keys", ["tenant"])


def downgrade() -> None:
    op.drop_index("ix_keys_tenant", table_name="keys")
    op.drop_table("keys")
    op.drop_table("job_events")
    op.drop_index("ix_feature_labels_dictionary_text", table_name="feature_labels")
    op.drop_table("feature_labels")
    op.drop_index("ix_vectors_name_shared", table_name="vectors")
    op.drop_table("vectors")
    op.drop_table("vector_names")
    op.drop_table("tenants")
    op.drop_index("ix_presets_name_shared", table_name="presets")
    op.drop_table("presets")
    op.drop_table("preset_names")
    op.drop_index("ix_jobs_status_model_queued_at", table_name="jobs")
    op.drop_index("ix_jobs_owner_number", table_name="jobs")
    op.drop_index("ix_jobs_lease_by", table_name="jobs")
    op.drop_index("ix_jobs_expires_at", table_name="jobs")
    op.drop_table("jobs")
    op.drop_table("dictionary_names")
    op.drop_index("ix_dictionaries_name_shared", table_name="dictionaries")
    op.drop_table("dictionaries")
    op.drop_index("ix_detectors_name_shared", table_name="detectors")
    op.drop_table("detectors")
    op.drop_table("detector_names")
    op.drop_index("ix_audit_time", table_name="audit")
    op.drop_index("ix_audit_tenant_number", table_name="audit")
    op.drop_index("ix_audit_key_id_number", table_name="audit")
    op.drop_table("audit")
