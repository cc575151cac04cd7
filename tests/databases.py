"""PostgreSQL for tests: a server of its own in a temporary folder, and a fresh database for each test.

Of SQLite there is a migrated file, as migrations take most of the time in which a server starts.

Tests that ask for the fixture ``database_url`` and bear the mark ``both_databases`` run on SQLite and on it.
Where it is not installed they are skipped, unless ``--require-postgres`` says that this is a failure.
``scripts/postgres.sh`` installs it, and ``conftest`` owns the one server.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from sqlalchemy import URL, create_engine
from sqlalchemy.exc import SQLAlchemyError

from app.storage.database import FILE_NAME, Database
from tests.waiting import wait_for

_INSTALLED: Final = "/usr/lib/postgresql"  # where Debian keeps programs that are not on PATH
_USER: Final = "engine"
_TEMPLATE: Final = "migrated"
_OPTIONS: Final = {
    "listen_addresses": "",
    # What survives a power cut is not what is tested.
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "shared_buffers": "32MB",
    "max_connections": "60",
}


class Postgres:
    """A server; it is reached by a socket in its folder, and not over the network.

    Args:
        programs: Where ``initdb`` and ``postgres`` are.
    """

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._counts = itertools.count()
        self._server: subprocess.Popen[bytes] | None = None
        # Short, since a socket's path must be, and not below pytest's folder, which is its user's alone.
        self._folder = Path(tempfile.mkdtemp(prefix="nnsight-postgres-"))
        self._as_user: dict[str, object] = {}
        if os.geteuid() == 0:  # which PostgreSQL refuses to be
            user = pwd.getpwnam("nobody")
            os.chown(self._folder, user.pw_uid, user.pw_gid)
            self._as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}

    def start(self) -> None:
        made = subprocess.run(
            [self._programs / "initdb", "--pgdata", self._folder / "data", "--username", _USER,
             "--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"],
            capture_output=True, check=False, cwd=self._folder, text=True, **self._as_user,
        )  # type: ignore[call-overload]  # fmt: skip
        assert made.returncode == 0, made.stderr
        self.run()
        self._create(_TEMPLATE, "template1")
        asyncio.run(self._migrate())

    def run(self) -> None:
        """Start the server, for the first time or again."""
        options = {**_OPTIONS, "unix_socket_directories": str(self._folder)}
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [
                    # Ends with us, also when we are killed.
                    *([setpriv, "--pdeathsig", "INT"] if (setpriv := shutil.which("setpriv")) else []),
                    self._programs / "postgres", "-D", self._folder / "data",
                    *(word for name, value in options.items() for word in ("-c", f"{name}={value}")),
                ],
                stdout=log, stderr=log, cwd=self._folder, **self._as_user,
            )  # type: ignore[call-overload]  # fmt: skip
        server = self._server
        wait_for(lambda: self._answers() or server.poll() is not None)
        assert self._answers(), self._log()

    def end(self) -> None:
        """End the server as a restart does, with whatever is connected; its data stay."""
        server, self._server = self._server, None
        if server is not None:
            server.send_signal(signal.SIGINT)
            server.wait(30)

    def close(self) -> None:
        self.end()
        shutil.rmtree(self._folder)

    def fresh(self, *, is_migrated: bool = True) -> str:
        """Make a database, and return its URL; it goes with the server."""
        name = f"test_{next(self._counts)}"
        self._create(name, _TEMPLATE if is_migrated else "template1")
        return self._url(name)

    def drop(self, url: str) -> None:
        name = url.split("?", 1)[0].rsplit("/", 1)[1]
        self._execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def _url(self, database: str) -> str:
        socket = str(self._folder / ".s.PGSQL.5432")
        # Without a driver, as an operator writes it.
        return URL.create(
            "postgresql", username=_USER, database=database, query={"unix_sock": socket}
        ).render_as_string(hide_password=False)

    def _create(self, name: str, template: str) -> None:
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')

    def _execute(self, statement: str) -> None:
        engine = create_engine(self._url("postgres").replace("postgresql:", "postgresql+pg8000:"))
        with engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(statement)
        engine.dispose()

    def _answers(self) -> bool:
        try:
            self._execute("SELECT 1")
        except SQLAlchemyError:
            return False
        return True

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    async def _migrate(self) -> None:
        await _migrated(Database(self._folder / "locks", self._url(_TEMPLATE)))


async def _migrated(database: Database) -> None:
    await database.start()
    await database.close()


@functools.cache
def _sqlite_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_migrated(Database(Path(folder))))
        return (Path(folder) / FILE_NAME).read_bytes()


def _give_tables(directory: Path) -> None:
    file = directory / FILE_NAME
    if not file.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_bytes(_sqlite_file())


async def give_tables(directory: Path, database_url: str = "") -> None:
    """Give a data directory SQLite's file, migrated, unless it has one or the database is elsewhere."""
    if not database_url:
        await asyncio.to_thread(_give_tables, directory)


def programs() -> Path | None:
    """Return where PostgreSQL's programs are, None where they are not installed."""
    on_path = shutil.which("initdb")
    places = [Path(on_path).resolve().parent] if on_path else []
    versions = [path for path in Path(_INSTALLED).glob("*/bin") if path.parent.name.isdecimal()]
    places += sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    return next((place for place in places if (place / "postgres").exists()), None)
