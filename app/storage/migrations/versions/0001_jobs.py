"""Jobs and what happened to them."""

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
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("num_interruptions", sa.Integer(), nullable=False),
        sa.Column("num_events", sa.Integer(), nullable=False),
        sa.Column("reruns", sa.Boolean(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("removed", sa.Boolean(), nullable=False),
        sa.Column("lease_by", sa.String(64)),
        sa.Column("lease_until", sa.Double()),
        sa.PrimaryKeyConstraint("number", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("owner", "idempotency_key", name="uq_jobs_owner_idempotency_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_status_model_queued_at", "jobs", ["status", "model", "queued_at"])
    op.create_index("ix_jobs_owner_number", "jobs", ["owner", "number"])
    op.create_index("ix_jobs_expires_at", "jobs", ["expires_at"])
    op.create_index("ix_jobs_lease_by", "jobs", ["lease_by"])
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


def downgrade() -> None:
    op.drop_table("job_events")
    op.drop_table("jobs")
