"""The audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True),
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
    for column in ("tenant", "key_id"):
        op.create_index(f"ix_audit_{column}_number", "audit", [column, "number"])
    op.create_index("ix_audit_time", "audit", ["time"])


def downgrade() -> None:
    op.drop_table("audit")
