"""A database of a test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.storage.database import Database
from tests.databases import give_tables


@pytest.fixture
async def database(tmp_path: Path, database_url: str) -> AsyncIterator[Database]:
    await give_tables(tmp_path, database_url)
    database = Database(tmp_path, database_url)
    await database.start()
    yield database
    await database.close()
