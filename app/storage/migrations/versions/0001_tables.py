"""All tables, as the code has them: until a release no database has to be brought from one form to another.

With the first release this file gets the statements that make them (``alembic revision --autogenerate``), and
each later change a file of its own.
"""

from __future__ import annotations

from alembic import op

from app.storage.tables import Base

# Renamed with each change of the tables until then: a database of an earlier checkout is refused.
revision = "0001b"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    Base.metadata.create_all(op.get_bind(), checkfirst=False)


def downgrade() -> None:
    Base.metadata.drop_all(op.get_bind(), checkfirst=False)
