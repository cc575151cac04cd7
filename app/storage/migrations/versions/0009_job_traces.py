"""Of which distributed trace the request was that let a job run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; of jobs that are there it is not known."""
    op.add_column("jobs", sa.Column("traceparent", sa.String(64), nullable=False, server_default=""))


def downgrade() -> None:
    """Forget it."""
    op.drop_column("jobs", "traceparent")
