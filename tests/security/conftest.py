"""The server of ``bare``: processes that run whatever they are sent, and its secret."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator

import pytest

from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.sandbox.forkserver import ForkServer
from nnsight_engine.sandbox.seccomp import machine
from tests.security.played_process import World

SECRET = "NNSIGHT_ENGINE_TEST_SECRET"
"""The variable of the engine's environment that no process has."""


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with made.closing:
        yield made


@pytest.fixture(scope="session")
def secret() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        found = secrets.token_hex()
        patch.setenv(SECRET, found)
        yield found


@pytest.fixture(scope="session")
def bare(secret: str) -> Iterator[ForkServer]:
    try:
        machine()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    server = ForkServer([sys.executable, "-m", "tests.security.bare"], b"", half_bytes=2**24, num_spare=2)
    server.start()
    give_up = time.monotonic() + 60
    while not server.is_ready and time.monotonic() < give_up:
        time.sleep(0.05)
    yield server
    server.close()
