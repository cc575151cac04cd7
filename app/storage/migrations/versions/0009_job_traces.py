"""The distributed trace of the request that let a job run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("traceparent", sa.String(64), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("jobs", "traceparent")
