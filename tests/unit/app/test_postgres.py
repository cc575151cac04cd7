"""PostgreSQL, where it is another than SQLite: two write at once, and it may be gone for a while."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from api_schemas.errors import ApiError
from api_schemas.keys import NewKey
from app.auth.keys import Keys
from app.storage.database import Database, DatabaseError
from app.storage.engines import location_of
from app.storage.keys import KeyStore
from app.storage.tables import TenantRow
from tests.databases import Postgres


@pytest.fixture
def url(postgres: Postgres) -> Iterator[str]:
    url = postgres.fresh()
    yield url
    postgres.drop(url)


@pytest.fixture
async def database(tmp_path: Path, url: str) -> AsyncIterator[Database]:
    database = Database(tmp_path, url)
    await database.start()
    yield database
    await database.close()


def names(session: Session) -> list[str]:
    return list(session.scalars(select(TenantRow.name)))


def add(name: str):
    return lambda session: session.add(TenantRow(name=name, limits={}, created_at=0.0))


async def test_servers_on_several_machines_that_start_at_once_migrate_once(
    postgres: Postgres, tmp_path: Path
):
    url = postgres.fresh(is_migrated=False)
    servers = [Database(tmp_path / str(count), url) for count in range(4)]
    await asyncio.gather(*(server.start() for server in servers))
    assert await servers[0].read(names) == []
    await asyncio.gather(*(server.close() for server in servers))


async def test_a_read_sees_one_state_and_writes_nothing(database: Database):
    is_reading, is_written = threading.Event(), threading.Event()

    def look_twice(session: Session) -> tuple[list[str], list[str]]:
        before = names(session)
        is_reading.set()
        assert is_written.wait(60)
        return before, names(session)

    looking = asyncio.create_task(database.read(look_twice))
    await asyncio.to_thread(is_reading.wait, 10)
    await database.write(add("late"))
    is_written.set()
    assert await looking == ([], [])
    with pytest.raises(DBAPIError, match="read-only"):
        await database.read(lambda session: session.execute(update(TenantRow).values(limits={})))


async def test_of_two_that_wait_for_each_other_one_begins_anew(database: Database):
    await database.write(add("a"))
    await database.write(add("b"))
    both_hold = threading.Barrier(2)
    num_runs = 0

    def change(first: str, second: str, session: Session) -> None:
        nonlocal num_runs
        num_runs += 1
        is_first_run = num_runs <= 2
        for name in (first, second):
            session.execute(update(TenantRow).where(TenantRow.name == name).values(created_at=1.0))
            if name == first and is_first_run:
                both_hold.wait(60)

    await asyncio.gather(
        database.write(lambda session: change("a", "b", session)),
        database.write(lambda session: change("b", "a", session)),
    )
    assert num_runs == 3


async def test_a_database_that_is_restarted_is_found_again(database: Database, postgres: Postgres):
    await database.write(add("before"))
    postgres.end()
    waiting = asyncio.create_task(database.write(add("meanwhile")))
    await asyncio.sleep(0.2)
    postgres.run()
    await waiting
    assert await database.read(names) == ["before", "meanwhile"]


async def test_a_connection_that_is_cut_in_the_middle_is_made_again(database: Database):
    num_runs = 0

    def cut(session: Session) -> None:
        nonlocal num_runs
        num_runs += 1
        session.add(TenantRow(name="once", limits={}, created_at=0.0))
        session.flush()
        if num_runs == 1:
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    await database.write(cut)
    assert (num_runs, await database.read(names)) == (2, ["once"])


async def test_a_database_that_stays_away_is_a_typed_error(
    database: Database, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.storage.database._DELAYS_S", (0.01,))
    keys = Keys(KeyStore(database))
    created = await keys.create(NewKey(tenant="acme"))
    postgres.end()
    try:
        for asked in (
            database.read(names),
            database.write(add("a")),
            keys.principal(f"Bearer {created.key}"),
        ):
            with pytest.raises(ApiError) as caught:
                await asked
            assert (caught.value.code, caught.value.status) == ("database_unavailable", 503)
    finally:
        postgres.run()
    assert (await keys.principal(f"Bearer {created.key}")).tenant == "acme"


async def test_where_there_is_none_the_server_does_not_start(tmp_path: Path):
    nowhere = "postgresql://me:hunter2@/db?unix_sock=%2Fnowhere%2F.s.PGSQL.5432"
    with pytest.raises(DatabaseError, match="NNSIGHT_ENGINE_DATABASE_URL") as caught:
        await Database(tmp_path, nowhere).start()
    assert "hunter2" not in str(caught.value)


async def test_keys_replaced_and_revoked_at_once_end_as_if_one_after_the_other(database: Database):
    keys = Keys(KeyStore(database))
    for _ in range(5):
        key = await keys.create(NewKey(tenant="acme"))
        answers = await asyncio.gather(
            keys.rotate(key.id, 3600), keys.rotate(key.id, 0), keys.revoke(key.id), return_exceptions=True
        )
        assert not [one for one in answers if isinstance(one, Exception) and not isinstance(one, ApiError)]
        with pytest.raises(ApiError):
            await keys.principal(f"Bearer {key.key}")


def test_a_password_or_a_driver_makes_no_other_place():
    place = location_of("postgresql://me:one@db.internal:5432/jobs")
    assert place == location_of("postgresql+psycopg://you:two@db.internal:5432/jobs")
    assert place != location_of("postgresql://me:one@db.internal:5432/others")
    assert "one" not in place
