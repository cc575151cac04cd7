"""Detectors and their names."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_COUNTER: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
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
        sa.Column("head", sa.JSON(), nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("source_sha256", sa.String(64)),
        sa.Column("training", sa.JSON()),
        sa.PrimaryKeyConstraint("number", name="pk_detectors"),
        sa.UniqueConstraint("id", name="uq_detectors_id"),
        sa.UniqueConstraint("tenant", "name", "version", name="uq_detectors_tenant_name_version"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_detectors_name_shared", "detectors", ["name", "shared"])


def downgrade() -> None:
    op.drop_table("detectors")
    op.drop_table("detector_names")
