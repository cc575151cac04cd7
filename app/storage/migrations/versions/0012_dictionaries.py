"""Dictionaries and their names, and the labels of their features."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_COUNTER: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "dictionary_names",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("versions", sa.Integer(), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name="pk_dictionary_names"),
    )
    op.create_table(
        "dictionaries",
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
        sa.Column("at", sa.String(128), nullable=False),
        sa.Column("output_at", sa.String(128)),
        sa.Column("architecture", sa.String(32), nullable=False),
        sa.Column("input_width", sa.Integer(), nullable=False),
        sa.Column("output_width", sa.Integer(), nullable=False),
        sa.Column("num_features", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("weights_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_labels", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_dictionaries"),
        sa.UniqueConstraint("id", name="uq_dictionaries_id"),
        sa.UniqueConstraint("tenant", "name", "version", name="uq_dictionaries_tenant_name_version"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_dictionaries_name_shared", "dictionaries", ["name", "shared"])
    op.create_table(
        "feature_labels",
        sa.Column("dictionary", _COUNTER, nullable=False),
        sa.Column("feature", sa.Integer(), nullable=False),
        sa.Column("text", sa.String(500), nullable=False),
        sa.Column("folded", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("dictionary", "feature", name="pk_feature_labels"),
        sa.ForeignKeyConstraint(
            ["dictionary"], ["dictionaries.number"], name="fk_feature_labels_dictionary", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_feature_labels_dictionary_text", "feature_labels", ["dictionary", "text"])


def downgrade() -> None:
    """Remove all dictionaries; the files of their weights stay."""
    op.drop_table("feature_labels")
    op.drop_table("dictionaries")
    op.drop_table("dictionary_names")
