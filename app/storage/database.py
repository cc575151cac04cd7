"""The database: opening, migrations, and the threads that run transactions.

SQL runs in a few dedicated threads and never on the event loop. Transactions are retried for a few seconds
if the database restarts meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from filelock import FileLock
from sqlalchemy import URL, Connection, Engine, func, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from api_schemas.errors import ApiError, ErrorCode
from app.storage.engines import WRITES, is_unreachable, open_engine, was_rolled_back

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_THREADS: Final = 4
_DELAYS_S: Final = (0.05, 0.5, 1.0, 2.0)
_MIGRATING: Final = 0x6E6E7369676874
"""The id of the advisory lock around migrations, for databases shared by several machines."""
FILE_NAME: Final = "server.db"


class DatabaseError(RuntimeError):
    pass


class Database:
    """Opens SQLAlchemy's ``url``, or SQLite in ``directory``, which also has the lock file for migrations."""

    def __init__(self, directory: Path, url: str = "") -> None:
        self._directory = directory
        self._given_url = url
        self._threads: ThreadPoolExecutor | None = None
        self._engine: Engine | None = None

    async def start(self) -> None:
        """Open the database and run migrations; DatabaseError also for one of a newer version."""
        if self._threads is not None:
            return
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="database")
        try:
            self._engine = await self._in_thread(self._open)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        threads, engine = self._threads, self._engine
        self._threads, self._engine = None, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)
        if engine is not None:
            await asyncio.to_thread(engine.dispose)

    async def read(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in a read-only transaction with a consistent snapshot; ``database_unavailable``."""
        return await self._in_thread(self._transaction, self._opened(), work)

    async def write(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in an atomic transaction.

        ``work`` may run more than once, so it must have no other side effects. With concurrent writers each
        statement sees the commits of others before it: preconditions of a write must be conditions of its
        statements, or rows read ``with_for_update``. After a cancellation or ``database_unavailable`` the
        transaction may have been committed nevertheless.
        """
        writing = self._opened().execution_options(**{WRITES: True})
        return await self._in_thread(self._transaction, writing, work)

    def _opened(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the database must be started before it is used; call start()")
        return self._engine

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    @classmethod
    def _transaction(cls, engine: Engine, work: Callable[[Session], T]) -> T:
        for delay_s in itertools.chain(_DELAYS_S, [None]):
            try:
                return cls._attempt(engine, work)
            except _UndoneError as undone:
                error = undone.error
                if delay_s is None:
                    raise error if was_rolled_back(error) else _unavailable() from error
                logger.warning("a transaction was rolled back and is retried: %s", error.orig)
                time.sleep(delay_s)
            except DBAPIError as error:
                # The connection was lost during the commit, so it is unknown whether the commit succeeded.
                raise (_unavailable() if is_unreachable(error) else error) from error
        raise AssertionError("the last attempt returns or raises")

    @staticmethod
    def _attempt(engine: Engine, work: Callable[[Session], T]) -> T:
        with Session(engine, expire_on_commit=False) as session:
            try:
                result = work(session)
                session.flush()
            except DBAPIError as error:
                if is_unreachable(error) or was_rolled_back(error):
                    raise _UndoneError(error) from error
                raise
            session.commit()
            return result

    def _open(self) -> Engine:
        lock = self._directory / "migrate.lock"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.touch()
        except OSError as error:
            raise DatabaseError(
                f"the folder {self._directory} cannot be written: {error.strerror}. NNSIGHT_ENGINE_DATA_DIR "
                "says where it is."
            ) from error
        # Servers that start at the same time migrate one after another. The lock also covers the switch to
        # WAL, which SQLite refuses to one of two concurrent attempts.
        with FileLock(lock):
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
        url = make_url(self._given_url) if self._given_url else file
        engine = open_engine(url, num_connections=_MAX_THREADS)
        try:
            with engine.execution_options(**{WRITES: True}).begin() as connection:
                if engine.dialect.name == "postgresql":
                    connection.execute(select(func.pg_advisory_xact_lock(_MIGRATING)))
                with migrations(connection) as config:
                    command.upgrade(config, "head")
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _place(self) -> str:
        try:
            # The password is masked.
            return str(make_url(self._given_url)) if self._given_url else f"in {self._directory}"
        except ArgumentError:
            return "of NNSIGHT_ENGINE_DATABASE_URL"


class _UndoneError(Exception):
    """A transaction was rolled back by the database and may be retried."""

    def __init__(self, error: DBAPIError) -> None:
        self.error = error


def _unavailable() -> ApiError:
    return ApiError(
        ErrorCode.DATABASE_UNAVAILABLE,
        "The server's database cannot be reached now; send the request again later.",
    )


@contextlib.contextmanager
def migrations(connection: Connection) -> Iterator[Config]:
    folder = importlib.resources.files("app.storage") / "migrations"
    with importlib.resources.as_file(folder) as path:
        config = Config()
        # ConfigParser interpolates %(name)s, so percent signs are escaped.
        config.set_main_option("script_location", str(path).replace("%", "%%"))
        config.attributes["connection"] = connection
        yield config


__all__ = ["FILE_NAME", "Database", "DatabaseError", "migrations"]
