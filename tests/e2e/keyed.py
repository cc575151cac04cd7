"""A real server with keys, which several modules of tests share, and keys as the command makes them."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from app.cli import main
from tests.e2e.server import Server

SCOPES: Final = ("completions", "interventions", "code")
_SEVERAL_START_S: Final = 600.0
SECRET: Final = "NNSIGHT_ENGINE_TEST_SECRET"
"""A variable of the server's, which no client is to learn."""


@dataclasses.dataclass(frozen=True)
class KeyedServer:
    """The server, keys of tenants by name, a file that no client is to touch, and what none is to learn."""

    server: Server
    keys: dict[str, str]
    canary: Path
    secret: str


@contextlib.contextmanager
def serving_several(
    checkpoint: Path, data: Path, arguments: Sequence[str], **variables: str
) -> Iterator[tuple[Server, dict[str, str]]]:
    """Serve a tiny model with several workers or engines; yield the server, and a key of each kind.

    Args:
        checkpoint: The model.
        data: Takes the server's data.
        arguments: vLLM's options, which ask for several.
        **variables: More of the server's environment.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NNSIGHT_ENGINE_DATA_DIR", str(data))
        keys = {
            "trusted": made(patch, "friend"),
            "untrusted": made(patch, "stranger", "--tier", "sandboxed"),
            "monitor": made(patch, "operator", "--scopes", "metrics"),
        }
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
    """Serve the bundled model to tenants of many kinds.

    Args:
        folder: Takes the server's data and the canary.
    """
    data, canary, secret = folder / "data", folder / "canary", secrets.token_hex()
    canary.mkdir()
    (canary / "file").write_text(secrets.token_hex())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NNSIGHT_ENGINE_DATA_DIR", str(data))
        keys = {
            "acme": made(patch, "acme", "--trusted-codecs"),
            "rival": made(patch, "rival"),
            "friend": made(patch, "friend"),
            "stranger": made(patch, "stranger", "--tier", "sandboxed"),
            "admin": made(patch, "operator", "--scopes", "admin"),
            "monitor": made(patch, "operator", "--scopes", "metrics"),
        }
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


def made(patch: pytest.MonkeyPatch, tenant: str, *options: str) -> str:
    """Return a key as the command prints it."""
    shown: list[str] = []
    patch.setattr("typer.echo", lambda text, err=False: None if err else shown.append(text))
    given = ["--tenant", tenant, "--scopes", ",".join(SCOPES), "--tier", "trusted", *options]
    assert main(["keys", "create", *given]) == 0
    (key,) = shown
    return key
