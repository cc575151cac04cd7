"""The database: where it is, how it is opened and brought up to date, and the threads that talk to it.

SQL runs in a few threads of its own and never on the event loop: ``read`` and ``write`` take a function of
a session and run it as one transaction. Nothing here or above is SQLite's own but the four settings that
it needs. ``create_app`` owns the one instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from filelock import FileLock
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session

T = TypeVar("T")

_MAX_THREADS: Final = 4
_BUSY_TIMEOUT_MS: Final = 30_000
_WRITES: Final = "nnsight_engine_writes"
FILE_NAME: Final = "server.db"


class DatabaseError(RuntimeError):
    """The database cannot be opened or brought up to date."""


class Database:
    """A database with the tables of this version.

    Args:
        directory: The server's folder; SQLite's file lies in it, and the lock of those that migrate.
        url: SQLAlchemy's URL of the database; empty for SQLite in ``directory``.
    """

    def __init__(self, directory: Path, url: str = "") -> None:
        """Remember where; nothing is opened before ``start``."""
        self._directory = directory
        self._given_url = url
        self._threads: ThreadPoolExecutor | None = None
        self._engine: Engine | None = None

    async def start(self) -> None:
        """Open the database and bring it up to date.

        Raises:
            DatabaseError: It cannot be opened, or a newer version made it.
        """
        if self._threads is not None:
            return
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="database")
        try:
            self._engine = await self._in_thread(self._open)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish what runs and close; harmless when repeated."""
        threads, engine = self._threads, self._engine
        self._threads, self._engine = None, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)
        if engine is not None:
            await asyncio.to_thread(engine.dispose)

    async def read(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in a transaction that sees one state; it must not write."""
        return await self._in_thread(self._transaction, self._opened(), work)

    async def write(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in a transaction that is there whole or not at all.

        It may run more than once and must do nothing but talk to the database. A caller that is cancelled
        does not know what became of it.
        """
        return await self._in_thread(
            self._transaction, self._opened().execution_options(**{_WRITES: True}), work
        )

    def _opened(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the database must be started before it is used; call start()")
        return self._engine

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    @staticmethod
    def _transaction(engine: Engine, work: Callable[[Session], T]) -> T:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            return work(session)

    def _open(self) -> Engine:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Servers that start at once migrate one after another; so does the switch to WAL, which SQLite
        # refuses to one of two that try at the same time.
        with FileLock(self._directory / "migrate.lock"):
            try:
                return self._migrated()
            except (SQLAlchemyError, CommandError, ImportError) as error:
                raise DatabaseError(
                    f"the database {self._place()} cannot be used: {error}. NNSIGHT_ENGINE_DATABASE_URL says "
                    "where it is; where a newer version of nnsight-engine made it, start that one, or set "
                    "NNSIGHT_ENGINE_DATA_DIR to another folder."
                ) from error

    def _migrated(self) -> Engine:
        file = URL.create("sqlite", database=str(self._directory / FILE_NAME))
        engine = create_engine(self._given_url or file, pool_size=_MAX_THREADS)
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _set_up_sqlite)
            event.listen(engine, "begin", _begin_in_sqlite)
        try:
            with engine.execution_options(**{_WRITES: True}).begin() as connection:
                _migrate(connection)
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _place(self) -> str:
        try:
            # Without its password.
            return str(make_url(self._given_url)) if self._given_url else f"in {self._directory}"
        except ArgumentError:
            return "of NNSIGHT_ENGINE_DATABASE_URL"


def _migrate(connection: Connection) -> None:
    with contextlib.ExitStack() as stack:
        folder = importlib.resources.files("app.storage") / "migrations"
        path = stack.enter_context(importlib.resources.as_file(folder))
        config = Config()
        # The configuration is one of those that replace %(name)s.
        config.set_main_option("script_location", str(path).replace("%", "%%"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # The driver would begin transactions when it pleases; _begin_in_sqlite does.
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout = {_BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        # A commit that was answered for is still there after the machine has lost its power.
        "synchronous = FULL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_in_sqlite(connection: Connection) -> None:
    # A transaction that reads before it writes would fail, not wait, where another wrote in between.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


__all__ = ["Database", "DatabaseError"]
