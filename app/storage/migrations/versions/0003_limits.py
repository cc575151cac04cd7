"""The limits of keys and tenants per minute and at once."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TABLES: Final = ("tenants", "keys")


def upgrade() -> None:
    """Rows that exist have no limits."""
    for table in _TABLES:
        op.add_column(table, sa.Column("limits", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    for table in _TABLES:
        op.drop_column(table, "limits")
