"""Vectors and their names."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_COUNTER: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "vector_names",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("versions", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name="pk_vector_names"),
    )
    op.create_table(
        "vectors",
        sa.Column("number", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(1024), nullable=False),
        sa.Column("leaf", sa.String(128), nullable=False),
        sa.Column("layers", sa.JSON(), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("source_sha256", sa.String(64)),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("training", sa.JSON()),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_vectors"),
        sa.UniqueConstraint("id", name="uq_vectors_id"),
        sa.UniqueConstraint("tenant", "name", "version", name="uq_vectors_tenant_name_version"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_vectors_name_shared", "vectors", ["name", "shared"])


def downgrade() -> None:
    op.drop_table("vectors")
    op.drop_table("vector_names")
