"""The output of jobs is counted, and a shared name stays its tenant's."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_PRINTED = """
UPDATE jobs SET event_bytes = coalesce(
    (SELECT sum(128 + coalesce(length(message), 0)) FROM job_events WHERE job_number = jobs.number), 0)
"""
_SHARED = """
UPDATE vector_names SET shared = :true WHERE EXISTS (
    SELECT 1 FROM vectors
    WHERE vectors.tenant = vector_names.tenant AND vectors.name = vector_names.name
    AND vectors.shared = :true)
"""


def upgrade() -> None:
    op.add_column("jobs", sa.Column("event_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(_PRINTED)
    op.add_column(
        "vector_names", sa.Column("shared", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.execute(sa.text(_SHARED).bindparams(true=True))


def downgrade() -> None:
    op.drop_column("vector_names", "shared")
    op.drop_column("jobs", "event_bytes")
