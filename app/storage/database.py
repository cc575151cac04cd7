"""The database: opening, migrations, and the threads that run transactions.

SQL runs in a few dedicated threads and never on the event loop. Transactions are retried for a few seconds if
the database restarts meanwhile. SQLite needs explicit BEGIN statements, PostgreSQL repeatable reads and the
detection of lost connections. Each database has folders of its own: files of another would look like orphans,
and be removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.resources
import itertools
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from filelock import FileLock
from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, func, make_url, select
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.orm import Session

from api_schemas.errors import ApiError, ErrorCode, printable
from app.settings import Settings

WRITES: Final = "nnsight_engine_writes"
"""The execution option of engines whose transactions write."""

_TIMEOUT_S: Final = 30
_DRIVER: Final = "postgresql+pg8000"
# Prefixes of PostgreSQL's error codes for lost connections and for servers that accept none.
_GONE: Final = ("08", "57P01", "57P02", "57P03", "57P05", "53300")
# The prefix for violated constraints, and the codes for serialization failures and deadlocks.
_REFUSED: Final = "23"
_GAVE_WAY: Final = ("40001", "40P01")


def open_engine(url: URL, *, num_connections: int) -> Engine:
    """Return an engine without connecting; ``postgresql://`` gets the driver that the server depends on."""
    if url.drivername in {"postgresql", "postgres"}:
        url = url.set(drivername=_DRIVER)
    engine = (
        _sqlite_engine(url, num_connections)
        if url.get_backend_name() == "sqlite"
        else _server_engine(url, num_connections)
    )
    event.listen(engine, "before_cursor_execute", _escape_parameters, retval=True)
    return engine


def _sqlite_engine(url: URL, num_connections: int) -> Engine:
    engine = create_engine(url, pool_size=num_connections)
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_in_sqlite)
    return engine


def _server_engine(url: URL, num_connections: int) -> Engine:
    # The timeout for a silent server; other drivers have options of their own in the URL.
    waits = {"timeout": _TIMEOUT_S} if url.drivername == _DRIVER else {}
    # Each connection is tested before use: servers restart, and firewalls drop idle connections.
    engine = create_engine(url, pool_size=num_connections, pool_pre_ping=True, connect_args=waits)
    event.listen(engine, "handle_error", _classify_error)
    if engine.dialect.name == "postgresql":
        event.listen(engine, "begin", _begin_in_postgresql)
    return engine


def location_of(url: str) -> str:
    """Return the database that a URL refers to, without user, password and driver."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        return url  # rejected when the database is opened
    return str(parsed._replace(drivername=parsed.get_backend_name(), username=None, password=None))


def is_unreachable(error: DBAPIError) -> bool:
    code = _code_of(error.orig)
    if error.connection_invalidated or code.startswith(_GONE):
        return True
    # Drivers report no code for a failed connection attempt. SQLite does not connect.
    is_remote = not isinstance(error.orig, sqlite3.Error)
    return is_remote and not code and isinstance(error, (InterfaceError, OperationalError))


def was_rolled_back(error: DBAPIError) -> bool:
    """Return whether the transaction was rolled back in favour of a concurrent one."""
    return _code_of(error.orig) in _GAVE_WAY


def _code_of(error: BaseException | None) -> str:
    """Return the SQLSTATE of a driver's error, which pg8000 has as ``C`` of its argument; empty for none."""
    code = getattr(error, "sqlstate", None)
    if code is None and error is not None and error.args and isinstance(error.args[0], Mapping):
        code = error.args[0].get("C")
    return code if isinstance(code, str) else ""


def _escape_parameters(
    _connection: Connection, _cursor: object, statement: str, parameters: Any, _context: object, _many: object
) -> tuple[str, Any]:
    """Escape characters that not every database can store; an id that contains NUL then matches no row."""
    return statement, _storable(parameters)


def _storable(value: Any) -> Any:
    """Return a parameter, with all that it contains, without NUL and lone surrogates."""
    match value:
        case str():
            return value if value.isascii() and "\0" not in value else printable(value).replace("\0", "\\x00")
        case dict():
            return {name: _storable(item) for name, item in value.items()}
        case tuple() | list():
            return type(value)(map(_storable, value))
        case _:
            return value


def _classify_error(context: ExceptionContext) -> Exception | None:
    """Tell SQLAlchemy which of the driver's errors are lost connections and violated constraints."""
    code = _code_of(context.original_exception)
    if code.startswith(_GONE):
        # A server that shuts down reports an error of its own before it closes the connection.
        context.is_disconnect = True
    elif code.startswith(_REFUSED) and not isinstance(context.sqlalchemy_exception, IntegrityError):
        # The driver has a single exception class for all errors and does not distinguish violated
        # constraints.
        return IntegrityError(context.statement, context.parameters, context.original_exception)
    return None


def _begin_in_postgresql(connection: Connection) -> None:
    # By default each statement would see its own snapshot. Writes keep that: their preconditions are in their
    # statements' conditions.
    if not connection.get_execution_options().get(WRITES, False):
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # Disables the driver's implicit BEGIN; _begin_in_sqlite issues it.
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout = {_TIMEOUT_S * 1000}",
        "journal_mode = WAL",
        # A commit that was acknowledged survives a power failure.
        "synchronous = FULL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_in_sqlite(connection: Connection) -> None:
    # A transaction that reads before it writes fails instead of waiting if another one wrote in between.
    writes = connection.get_execution_options().get(WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


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
            self._engine = await self._in_thread(self._open_and_migrate)
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
        return await self._in_thread(self._run_transaction, self._started_engine(), work)

    async def write(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in an atomic transaction.

        ``work`` may run more than once, so it must have no other side effects. With concurrent writers each
        statement sees the commits of others before it: preconditions of a write must be conditions of its
        statements, or rows read ``with_for_update``. After a cancellation or ``database_unavailable`` the
        transaction may have been committed nevertheless.
        """
        writing = self._started_engine().execution_options(**{WRITES: True})
        return await self._in_thread(self._run_transaction, writing, work)

    def _started_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the database must be started before it is used; call start()")
        return self._engine

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    @classmethod
    def _run_transaction(cls, engine: Engine, work: Callable[[Session], T]) -> T:
        """Run a transaction in this thread; one that was rolled back is retried after some delays."""
        for delay_s in itertools.chain(_DELAYS_S, [None]):
            try:
                return cls._attempt_transaction(engine, work)
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
    def _attempt_transaction(engine: Engine, work: Callable[[Session], T]) -> T:
        """Commit what ``work`` does; _UndoneError if the database surely has nothing of it."""
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

    def _open_and_migrate(self) -> Engine:
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
                return self._open_migrated()
            except (SQLAlchemyError, CommandError, ImportError) as error:
                raise DatabaseError(
                    f"the database {self._location()} cannot be used: {error}. NNSIGHT_ENGINE_DATABASE_URL "
                    "says where it is; where another version of nnsight-engine made it, start that one, or "
                    "set NNSIGHT_ENGINE_DATA_DIR to another folder."
                ) from error

    def _open_migrated(self) -> Engine:
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

    def _location(self) -> str:
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
    """Yield Alembic's configuration for migrations over a connection."""
    folder = importlib.resources.files("app.storage") / "migrations"
    with importlib.resources.as_file(folder) as path:
        config = Config()
        # ConfigParser interpolates %(name)s, so percent signs are escaped.
        config.set_main_option("script_location", str(path).replace("%", "%%"))
        config.attributes["connection"] = connection
        yield config


def job_folder(settings: Settings) -> Path:
    if not settings.database_url:
        return settings.data_dir
    return settings.data_dir / _name_of(location_of(settings.database_url))


def dictionary_folder(settings: Settings) -> Path:
    """Return the folder of this database's dictionaries: in ``dictionary_dir``, else in that of its jobs."""
    if settings.dictionary_dir is None:
        return job_folder(settings) / "dictionaries"
    url = settings.database_url
    return settings.dictionary_dir / _name_of(location_of(url) if url else str(settings.data_dir.absolute()))


def _name_of(database: str) -> str:
    return f"database-{hashlib.sha256(database.encode()).hexdigest()[:16]}"
