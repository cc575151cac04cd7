"""The database: opened, migrated, shared; and PostgreSQL where it is another than SQLite."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, inspect, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from api_schemas.administration import NewKey
from api_schemas.errors import ApiError
from app.auth.keys import Keys
from app.storage.database import FILE_NAME, Database, DatabaseError, location_of, migrations
from app.storage.keys import KeyStore
from app.storage.tables import Base, EventRow, TenantRow
from tests.databases import Postgres


@pytest.mark.both_databases
async def test_the_migrations_make_the_tables_that_the_server_uses(database: Database):

    def differences(session: Session) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(session.connection()), Base.metadata))

    assert await database.read(differences) == []


@pytest.mark.both_databases
async def test_every_migration_can_be_taken_back(database: Database):

    def tables(session: Session) -> set[str]:
        return set(inspect(session.connection()).get_table_names())

    def go(to: str, session: Session) -> set[str]:
        with migrations(session.connection()) as config:
            (command.downgrade if to == "base" else command.upgrade)(config, to)
        return tables(session)

    made = await database.read(tables)
    assert {"jobs", "job_events", "keys", "tenants"} <= made
    await database.write(lambda session: session.add(TenantRow(name="acme", limits={}, created_at=1.5)))
    assert await database.write(lambda session: go("base", session)) == {"alembic_version"}
    assert await database.write(lambda session: go("head", session)) == made


@pytest.mark.both_databases
async def test_text_that_a_database_cannot_hold_is_kept_as_escapes(database: Database):
    odd = TenantRow(name="a\0b\ud800ü", limits={}, created_at=0.1 + 0.2)
    await database.write(lambda session: session.add(odd))
    (kept,) = await database.read(lambda session: session.scalars(select(TenantRow)).all())
    assert (kept.name, kept.created_at) == ("a\\x00b\\ud800ü", 0.1 + 0.2)
    assert await database.read(lambda session: session.get(TenantRow, "\0")) is None


async def test_it_survives_a_crash_in_the_middle_and_waits_for_others(tmp_path: Path):
    database = Database(tmp_path / "a % b")
    await database.start()
    settings = ["journal_mode", "synchronous", "foreign_keys", "busy_timeout"]

    def pragmas(session: Session) -> list[object]:
        return [session.scalar(text(f"PRAGMA {name}")) for name in settings]

    assert await database.read(pragmas) == ["wal", 2, 1, 30_000]
    assert stat.S_IMODE((tmp_path / "a % b").stat().st_mode) == 0o700
    await database.close()


@pytest.mark.both_databases
async def test_a_write_that_fails_leaves_nothing(database: Database):

    def orphan(session: Session) -> None:
        session.execute(text("CREATE TABLE half (a INTEGER)"))
        session.execute(insert(EventRow), [{"job_number": 7, "seq": 1, "status": "LOG", "time": 0.0}])

    with pytest.raises(IntegrityError):
        await database.write(orphan)
    assert await database.read(lambda session: session.scalars(select(EventRow.seq)).all()) == []
    with pytest.raises(Exception, match="half"):
        await database.read(lambda session: session.execute(text("SELECT * FROM half")))


async def test_writers_that_read_first_wait_for_each_other(tmp_path: Path):
    first, second = Database(tmp_path), Database(tmp_path)
    await first.start()
    await second.start()
    await first.write(lambda session: session.execute(text("CREATE TABLE counts (n INTEGER)")))
    await first.write(lambda session: session.execute(text("INSERT INTO counts VALUES (0)")))

    def count(session: Session) -> None:
        value = session.scalar(text("SELECT n FROM counts"))
        session.execute(text("UPDATE counts SET n = :n"), {"n": value + 1})

    await asyncio.gather(*(database.write(count) for database in [first, second] * 25))
    assert await second.read(lambda session: session.scalar(text("SELECT n FROM counts"))) == 50
    await first.close()
    await second.close()


def _start(directory: Path) -> None:
    async def run() -> None:
        database = Database(directory)
        await database.start()

    asyncio.run(run())


def test_processes_that_start_at_once_migrate_once(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_start, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]


async def test_a_database_of_a_newer_version_is_refused_by_name(tmp_path: Path):
    older = Database(tmp_path)
    await older.start()
    await older.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(DatabaseError, match=r"newer.*NNSIGHT_ENGINE_DATA_DIR"):
        await Database(tmp_path).start()


async def test_what_is_no_database_is_refused_and_kept(tmp_path: Path):
    (tmp_path / FILE_NAME).write_bytes(b"something else entirely" * 100)
    with pytest.raises(DatabaseError):
        await Database(tmp_path).start()
    assert (tmp_path / FILE_NAME).read_bytes().startswith(b"something else")


@pytest.mark.parametrize(
    "url",
    ["postgresql+psycopg://me:hunter2@nowhere/db", "nonsense", "sqlite://me:hunter2@/x.db"],
    ids=["no driver", "no url", "no such form"],
)
async def test_urls_that_do_not_work_are_refused_without_their_password(tmp_path: Path, url: str):
    with pytest.raises(DatabaseError, match="NNSIGHT_ENGINE_DATABASE_URL") as caught:
        await Database(tmp_path, url).start()
    assert "hunter2" not in str(caught.value)


on_postgres = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


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


@on_postgres
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


@on_postgres
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


@on_postgres
async def test_a_database_that_is_restarted_is_found_again(database: Database, postgres: Postgres):
    await database.write(add("before"))
    postgres.end()
    waiting = asyncio.create_task(database.write(add("meanwhile")))
    await asyncio.sleep(0.2)
    postgres.run()
    await waiting
    assert await database.read(names) == ["before", "meanwhile"]


@on_postgres
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


@on_postgres
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


@on_postgres
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
