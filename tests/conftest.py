"""Fixtures of all tests; servers that tests start write nothing to the user's home directory."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import HealthCheck, settings

from tests.memory import ProcessMemory
from tests.parallel import WORKER, Scheduling, make_scheduler, take_one_core
from tests.sharing import lacking
from tests.slices import add_options, chosen_slice, header, keep_slice, start_recording

if TYPE_CHECKING:
    from tests.databases import Postgres

KINDS: Final = ("sqlite", "postgresql")

# No verdict depends on how fast examples are made, or on which ones come up.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("any machine")
# A shell that starts the tests in its background has them ignore Ctrl-C, and all processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

if WORKER in os.environ:
    take_one_core(os.environ)  # before torch is imported


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    return make_scheduler(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-postgres", action="store_true", help="fail where PostgreSQL is not installed")
    parser.addoption("--require-chromium", action="store_true", help="fail where Chromium is not installed")
    parser.addoption("--require-node", action="store_true", help="fail where Node.js is not installed")
    parser.addoption("--require-clients", action="store_true", help="fail where clients are not installed")
    parser.addoption("--require-promtool", action="store_true", help="fail where promtool is not installed")
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    start_recording(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return header(config)


@pytest.hookimpl(tryfirst=True)  # before those that look for the tests that share a server
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = chosen_slice(config)
    if chosen is not None:
        keep_slice(config, items, chosen)


def pytest_collection() -> None:
    """Import without garbage collections: what modules and tests consist of lives as long as the run."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Spare every garbage collection of the run the thousands of tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


def seed(name: str) -> None:
    """Let what is drawn from now on follow from the name; modules that nobody has imported stay so."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(number)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Have a fixture draw the same, whichever test needs it first."""
    seed(f"{fixturedef.baseid}::{fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Have a test draw the same, whichever ran before."""
    seed(item.nodeid)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = metafunc.definition.get_closest_marker("both_databases")
    if marked is not None and "database_url" in metafunc.fixturenames:
        metafunc.parametrize("database_url", KINDS, indirect=True)


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point the default of ``data_dir`` elsewhere, for this process and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data_home")))
        yield


@pytest.fixture(scope="session")
def process_memory() -> ProcessMemory:
    return ProcessMemory()


@pytest.fixture(scope="module", autouse=True)
def unused_memory(process_memory: ProcessMemory) -> Iterator[None]:
    """Free the memory of a module's engines after its other fixtures have ended."""
    yield
    process_memory.release()


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    """A PostgreSQL of the tests' own."""
    from tests.databases import Postgres, programs  # noqa: PLC0415 - SQLAlchemy is for tests that want it

    found = programs()
    if found is None:
        lacking(
            request,
            "--require-postgres",
            "PostgreSQL is not installed; scripts/postgres.sh does that on Debian, as root",
        )
    server = Postgres(found)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def npm(request: pytest.FixtureRequest) -> str:
    """Where npm is, which comes with Node.js."""
    found = shutil.which("npm")
    if found is None:
        lacking(request, "--require-node", "Node.js is not installed; scripts/node.sh does that where it can")
    return found


@pytest.fixture
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The setting ``database_url``: of SQLite in the data directory, or of a new database of PostgreSQL's."""
    if getattr(request, "param", KINDS[0]) == KINDS[0]:
        yield ""
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.fresh()
    yield url
    server.drop(url)
