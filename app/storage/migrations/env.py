"""Run by Alembic to migrate: the connection comes from ``app.storage.database``."""

from __future__ import annotations

from alembic import context

from app.storage.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite alters a table by making it anew
)
with context.begin_transaction():
    context.run_migrations()
