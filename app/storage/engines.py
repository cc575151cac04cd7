"""Connections to a database, opened so that every kind keeps the promises of ``database``.

What a kind needs for that is here and nowhere else: SQLite four settings, and its transactions begun by hand;
PostgreSQL reads that see one state, and a way to tell that a connection is lost; all of them text without
what some cannot hold. ``Database`` opens one engine and asks of each fault whether to try again.
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
# How PostgreSQL's codes begin of a connection that is over, and of a server that takes none.
_GONE: Final = ("08", "57P01", "57P02", "57P03", "57P05", "53300")
# What breaks a constraint, and two transactions of which one had to give way.
_REFUSED: Final = "23"
_GAVE_WAY: Final = ("40001", "40P01")


def open_engine(url: URL, *, num_connections: int) -> Engine:
    """Return an engine for a database; nothing is connected yet.

    Args:
        url: Where it is; ``postgresql://`` without a driver gets the one that is installed with the server.
        num_connections: How many threads use it.
    """
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
    # How long a server that says nothing is waited for; other drivers have their own word in the URL.
    waits = {"timeout": _TIMEOUT_S} if url.drivername == _DRIVER else {}
    # Asked before each transaction whether it is still there: servers restart, and firewalls forget.
    engine = create_engine(url, pool_size=num_connections, pool_pre_ping=True, connect_args=waits)
    event.listen(engine, "handle_error", _tell_kind)
    if engine.dialect.name == "postgresql":
        event.listen(engine, "begin", _begin_in_postgresql)
    return engine


def place_of(url: str) -> str:
    """Return which database a URL names, whoever logs in there and with whatever driver."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        return url  # it is refused when it is opened
    return str(parsed._replace(drivername=parsed.get_backend_name(), username=None, password=None))


def is_unreachable(error: DBAPIError) -> bool:
    """Tell whether an error says that the database is not to be reached now."""
    code = _code_of(error.orig)
    if error.connection_invalidated or code.startswith(_GONE):
        return True
    # Of a connection that could not be made drivers tell no code. SQLite has none to make.
    is_remote = not isinstance(error.orig, sqlite3.Error)
    return is_remote and not code and isinstance(error, (InterfaceError, OperationalError))


def gave_way(error: DBAPIError) -> bool:
    """Tell whether a transaction was undone for the sake of another that ran beside it."""
    return _code_of(error.orig) in _GAVE_WAY


def _code_of(error: BaseException | None) -> str:
    """Return PostgreSQL's code of an error, as the driver tells it; nothing where there is none."""
    code = getattr(error, "sqlstate", None)
    if code is None and error is not None and error.args and isinstance(error.args[0], Mapping):
        code = error.args[0].get("C")
    return code if isinstance(code, str) else ""


def _hold_text(
    _connection: Connection, _cursor: object, statement: str, parameters: Any, _context: object, _many: object
) -> tuple[str, Any]:
    """Put escapes for what not every database can hold; an id with NUL becomes one that nothing has."""
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


def _tell_kind(context: ExceptionContext) -> Exception | None:
    code = _code_of(context.original_exception)
    if code.startswith(_GONE):
        # A server that shuts down says so in words of its own before it hangs up.
        context.is_disconnect = True
    elif code.startswith(_REFUSED) and not isinstance(context.sqlalchemy_exception, IntegrityError):
        # Of what breaks a constraint the driver knows one kind only.
        return IntegrityError(context.statement, context.parameters, context.original_exception)
    return None


def _begin_in_postgresql(connection: Connection) -> None:
    # Each statement would see a state of its own. Writes do: what they rely on is in their conditions.
    if not connection.get_execution_options().get(WRITES, False):
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # The driver would begin transactions when it pleases; _begin_in_sqlite does.
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout = {_TIMEOUT_S * 1000}",
        "journal_mode = WAL",
        # A commit that was answered for is still there after the machine has lost its power.
        "synchronous = FULL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_in_sqlite(connection: Connection) -> None:
    # A transaction that reads before it writes would fail, not wait, where another wrote in between.
    writes = connection.get_execution_options().get(WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


__all__ = ["WRITES", "gave_way", "is_unreachable", "open_engine", "place_of"]
