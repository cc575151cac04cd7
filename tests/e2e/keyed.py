"""A real server with keys, which several modules of tests share, and keys as the command makes them."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from app.cli import main
from tests.e2e.server import Server

SCOPES: Final = ("completions", "interventions", "code")
OPERATOR: Final = ("--scopes", ",".join(("admin", "metrics", *SCOPES)))
"""Options of a key that may do everything."""
STRANGER: Final = ("--tier", "sandboxed")
"""Options of a key whose code is sandboxed."""
ENGINE_HEADER: Final = "X-data-parallel-rank"
"""vLLM's header, which chooses the engine of a request."""
_SEVERAL_START_S: Final = 600.0
SECRET: Final = "NNSIGHT_ENGINE_TEST_SECRET"
"""A variable of the server's, which no client is to learn."""


class Tenant(httpx.Client):
    """A client with a key; ``engine`` chooses the engine of a request."""

    def __init__(self, server: Server, key: str) -> None:
        super().__init__(base_url=server.base_url, headers={"authorization": f"Bearer {key}"}, timeout=300)
        self.key = key

    def complete(self, *operations: dict[str, Any], engine: str = "", **body: Any) -> httpx.Response:
        asked = {"max_tokens": 8, "temperature": 0, **body}
        asked |= {"interventions": list(operations)} if operations else {}
        return self.post("/v1/completions", json=asked, headers={ENGINE_HEADER: engine} if engine else None)

    def choices(self, *operations: dict[str, Any], **asked: Any) -> list[dict[str, Any]]:
        answer = self.complete(*operations, **asked)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["choices"]
        return found


@dataclasses.dataclass(frozen=True)
class KeyedServer:
    """The server, keys of tenants by name, a file that no client is to touch, and what none is to learn."""

    server: Server
    keys: dict[str, str]
    canary: Path
    secret: str

    def tenant(self, name: str) -> Tenant:
        return Tenant(self.server, self.keys[name])


@contextlib.contextmanager
def serving_several(
    checkpoint: Path, data: Path, arguments: Sequence[str], **variables: str
) -> Iterator[tuple[Server, dict[str, str]]]:
    """Serve a tiny model with several workers or engines; yield the server, and a key of each kind."""
    keys = keys_in(data, trusted=(), untrusted=STRANGER, monitor=("--scopes", "metrics"), operator=OPERATOR)
    environment = {
        "NNSIGHT_ENGINE_DATA_DIR": str(data),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    arguments = [*arguments, "--dtype", "float32"]
    server = Server(
        str(checkpoint), arguments=arguments, environment=environment, ready_timeout_s=_SEVERAL_START_S
    )
    with server:
        yield server, keys


@contextlib.contextmanager
def serving_keys(folder: Path) -> Iterator[KeyedServer]:
    """Serve the bundled model to tenants of many kinds."""
    data, canary, secret = folder / "data", folder / "canary", secrets.token_hex()
    canary.mkdir()
    (canary / "file").write_text(secrets.token_hex())
    keys = keys_in(
        data,
        acme=("--trusted-codecs",),
        rival=(),
        friend=(),
        stranger=STRANGER,
        admin=("--scopes", "admin"),
        monitor=("--scopes", "metrics"),
    )
    arguments = ["--host", "0.0.0.0", "--max-model-len", "1024", "--enable-prompt-tokens-details"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environment = {
        SECRET: secret,
        "NNSIGHT_ENGINE_DATA_DIR": str(data),
        "NNSIGHT_ENGINE_ALLOW_CLOUDPICKLE": "1",
        "NNSIGHT_ENGINE_MAX_SANDBOXES": "12",
    }
    with Server(arguments=arguments, environment=environment) as server:
        yield KeyedServer(server, keys, canary / "file", secret)


def keys_in(data: Path, **tenants: Sequence[str]) -> dict[str, str]:
    """Make a key of each tenant in a server's data, with options of the command; return what this prints."""
    found: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NNSIGHT_ENGINE_DATA_DIR", str(data))
        for tenant, options in tenants.items():
            shown: list[str] = []
            patch.setattr("typer.echo", lambda text, err=False, to=shown: None if err else to.append(text))
            given = ["--tenant", tenant, "--scopes", ",".join(SCOPES), "--tier", "trusted", *options]
            assert main(["keys", "create", *given]) == 0
            (found[tenant],) = shown
    return found


@contextlib.contextmanager
def beside_vllm(
    model: Path, options: Sequence[str], data: Path, **variables: str
) -> Iterator[list[httpx.Client]]:
    """Serve a model twice, by us and by vLLM itself; yield an operator's clients, ours first."""
    key = keys_in(data, operator=OPERATOR)["operator"]
    vllm = Server(
        command=["-m", "vllm.entrypoints.openai.api_server"],
        ready_path="/health",
        arguments=["--model", str(model), *options],
        environment={
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_SERVER_DEV_MODE": "1",
            **variables,
        },
    )
    ours = Server(
        str(model), arguments=options, environment={"NNSIGHT_ENGINE_DATA_DIR": str(data), **variables}
    )
    headers = {"authorization": f"Bearer {key}"}  # which vLLM's does not ask for
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        both = list(pool.map(stack.enter_context, [ours, vllm]))
        yield [
            stack.enter_context(httpx.Client(base_url=server.base_url, timeout=120, headers=headers))
            for server in both
        ]
