"""Presets and their names, and the presets that a key is limited to."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_COUNTER: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
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
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("operations", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_presets"),
        sa.UniqueConstraint("id", name="uq_presets_id"),
        sa.UniqueConstraint("tenant", "name", "version", name="uq_presets_tenant_name_version"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_presets_name_shared", "presets", ["name", "shared"])
    op.add_column("keys", sa.Column("presets", sa.JSON()))


def downgrade() -> None:
    """Remove all presets; limited keys are revoked, since they would not be limited any more."""
    op.execute("UPDATE keys SET revoked_at = created_at WHERE presets IS NOT NULL AND revoked_at IS NULL")
    op.drop_column("keys", "presets")
    op.drop_table("presets")
    op.drop_table("preset_names")
