"""The key that let a job run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("key_id", sa.String(32), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("jobs", "key_id")
