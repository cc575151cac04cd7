"""The server of ``bare``: processes that run whatever they are sent, and its secret."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from nnsight_engine.families.dense import LLAMA, LLAMA_LEAVES
from nnsight_engine.sandbox.confine import machine
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.sandbox.forkserver import ForkServer
from nnsight_engine.serialization import encode
from nnsight_engine.vllm_backend.module_tree import BlockPoints, ModelLayout
from nnsight_engine.vllm_backend.traces.remote_modules import described
from tests.security.played import LIMITS, REFUSED, VOCABULARY, WIDTH, Outline
from tests.security.played_process import World
from tests.waiting import wait_for

_ZYGOTE: Final = "nnsight_engine.vllm_backend.traces.sandboxed.worker_zygote"
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
    wait_for(lambda: server.is_ready)
    yield server
    server.close()


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    try:
        machine()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    outline = Outline()
    block = BlockPoints(
        dict(LLAMA_LEAVES), LLAMA.kernel, num_heads=2, num_kv_heads=2, head_dim=4, inner_size=16
    )
    num_layers = len(list(outline.get_submodule(LLAMA.layers).children()))
    setup = {
        "modules": described(outline),
        "layout": ModelLayout(LLAMA, (block,) * num_layers).to_plain(),
        "sizes": {"hidden_size": WIDTH, "vocab_size": VOCABULARY, "tensor_parallel_size": 1},
        "limits": dataclasses.asdict(LIMITS),
        "entry": "",
        "refused": [REFUSED],
        "call_bytes": 2**20,
    }
    server = ForkServer([sys.executable, "-m", _ZYGOTE], encode(setup), LIMITS.sandbox_message_bytes, 2)
    server.start()
    wait_for(lambda: server.is_ready, 120)
    yield server
    server.close()
