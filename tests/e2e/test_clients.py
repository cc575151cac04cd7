"""Clients of other projects, as their users call them, against a real server.

The scripts in ``tests/e2e/clients`` run in the environment of ``scripts/clients.sh``. ``test_example`` tests
``openai`` for Node.js.
"""

from __future__ import annotations

import base64
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import MODEL
from tests.e2e.server import Server
from tests.narrow_model import WIDTH
from tests.sharing import lacking

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

PROJECT = Path(__file__).resolve().parents[2]
PYTHON = PROJECT / ".venv-clients/bin/python"
SCRIPTS = PROJECT / "tests/e2e/clients"
MAX_TOKENS = 8
AXIS = [float(index == 64) for index in range(WIDTH)]
INTERVENTIONS = [
    {"op": "steer", "at": "layers.15.output", "vector": [AXIS], "mode": "norm_match", "scale": 0.6},
    {"op": "capture", "at": "layers.20.output", "reduce": "last", "dtype": "float32", "name": "seen"},
]

Ask = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def ask(request: pytest.FixtureRequest, narrow_server: Server) -> Ask:
    """Return what runs a client's script and returns what it prints."""
    if not PYTHON.exists():
        lacking(request, "--require-clients", "the clients are not installed; scripts/clients.sh does that")
    asked = {
        "url": narrow_server.base_url,
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": MAX_TOKENS,
        "interventions": INTERVENTIONS,
    }
    # Without its variable LiteLLM fetches prices from its vendor.
    environment = {"PATH": "/usr/bin:/bin", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}

    def run(name: str) -> dict[str, Any]:
        command = [str(PYTHON), str(SCRIPTS / f"{name}_client.py"), json.dumps(asked)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


@pytest.fixture(scope="module")
def expected(ask: Ask) -> dict[str, Any]:
    return ask("openai")


def text(pieces: list[str | None]) -> str:
    return "".join(piece or "" for piece in pieces)


def norm(results: dict[str, Any]) -> float:
    (point,) = results["seen"]["points"].values()
    assert point["shape"] == [WIDTH]
    row = memoryview(base64.b64decode(point["data"])).cast("f")
    return math.sqrt(sum(value * value for value in row))


def test_the_client_of_openai(expected: dict[str, Any]) -> None:
    assert expected["chat"]
    assert text(expected["stream"]) == expected["response"] == expected["chat"]
    assert len(expected["stream"]) > 2
    assert expected["steered"] != expected["chat"]
    assert text(expected["steered_stream"]) == expected["steered_response"] == expected["steered"]
    assert norm(expected["results"]) > 0
    assert "interventions" in expected["streamed_results"]


def test_the_client_of_anthropic(ask: Ask, expected: dict[str, Any]) -> None:
    found = ask("anthropic")
    assert found["chat"] == text(found["stream"]) == expected["chat"]
    assert found["steered"] == text(found["steered_stream"]) == expected["steered"]
    assert norm(found["results"]) == pytest.approx(norm(expected["results"]), rel=0.02)
    assert found["count"] == found["used"] > 0


@pytest.mark.parametrize("name", ["litellm", "langchain", "llm", "inspect"])
def test_clients_that_speak_openais_api(name: str, ask: Ask, expected: dict[str, Any]) -> None:
    found = ask(name)
    for field in found.keys() & {"chat", "steered"}:
        assert found[field] == expected[field]
    for field in found.keys() & {"stream", "steered_stream"}:
        assert text(found[field]) == text(expected[field])
        assert len(found[field]) > 2
    if "results" in found:
        assert norm(found["results"]) == pytest.approx(norm(expected["results"]), rel=0.02)
