"""SQLAlchemy engines for which every kind of database keeps the guarantees of ``database``.

SQLite needs explicit BEGIN statements, PostgreSQL repeatable reads and the detection of lost connections.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InterfaceError, OperationalError

from app.json_text import printable

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
        _sqlite(url, num_connections) if url.get_backend_name() == "sqlite" else _other(url, num_connections)
    )
    event.listen(engine, "before_cursor_execute", _hold_text, retval=True)
    return engine


def _sqlite(url: URL, num_connections: int) -> Engine:
    engine = create_engine(url, pool_size=num_connections)
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_in_sqlite)
    return engine


def _other(url: URL, num_connections: int) -> Engine:
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
    code = getattr(error, "sqlstate", None)
    if code is None and error is not None and error.args and isinstance(error.args[0], Mapping):
        code = error.args[0].get("C")
    return code if isinstance(code, str) else ""


def _hold_text(
    _connection: Connection, _cursor: object, statement: str, parameters: Any, _context: object, _many: object
) -> tuple[str, Any]:
    """Escape characters that not every database can store; an id that contains NUL then matches no row."""
    return statement, _storable(parameters)


def _storable(value: Any) -> Any:
    match value:
        case str():
            return value if value.isascii() and "\0" not in value else printable(value).replace("\0", "\\x00")
        case dict():
            return {name: _storable(one) for name, one in value.items()}
        case tuple() | list():
            return type(value)(map(_storable, value))
        case _:
            return value


def _classify_error(context: ExceptionContext) -> Exception | None:
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


__all__ = ["WRITES", "is_unreachable", "location_of", "open_engine", "was_rolled_back"]
