"""The example of a sparse autoencoder from a server's activations, on the real server, with small numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx
import pytest
from safetensors.torch import load_file

from tests.e2e.server import PROJECT, Server
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

SMALL: Final = (
    "--texts", "24", "--text-tokens", "16", "--features", "64", "--active", "8", "--steps", "60",
    "--samples", "1", "--max-tokens", "8",
)  # fmt: skip
WIDTH: Final = 576


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.sae_on_server", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240, check=False)


def until_stored(client: httpx.Client) -> None:
    """Wait for the last of the examples, which are stored beside the first requests."""
    wait_for(lambda: client.get("/v1/dictionaries", params={"name": "example-topics"}).json()["data"])


def test_it_trains_stores_labels_reads_and_steers(bundled_server: Server, tmp_path: Path) -> None:
    arguments = ("--base-url", bundled_server.base_url, "--folder", str(tmp_path), "--name", "small", *SMALL)
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    for text in (
        "tokens of 24 texts, after layer 15",
        "of the variance is explained",
        "Stored as small@1",
        "A text by its features",
        "“law” not changed",
        "sae.png",
    ):
        assert text in result.stdout, result.stdout
    labels = json.loads((tmp_path / "labels.json").read_text(encoding="utf-8"))
    with httpx.Client(base_url=bundled_server.base_url, timeout=60) as client:
        (stored,) = client.get("/v1/dictionaries", params={"name": "small"}).json()["data"]
        assert (stored["at"], stored["architecture"]) == ("layers.15.output", "topk")
        assert stored["num_labels"] == len(labels)
        found = client.get(
            f"/v1/dictionaries/{stored['id']}/features", params={"query": "law", "limit": 100}
        ).json()
        assert "law" in [one["label"] for one in found["data"]]
        assert all(labels[str(one["id"])] == one["label"] for one in found["data"])
    states = load_file(tmp_path / "states.safetensors")["states"]
    corpus = json.loads((tmp_path / "texts.json").read_text(encoding="utf-8"))
    assert states.shape == (len(corpus["tokens"]), WIDTH)
    # The first token's state is many times longer than the others.
    assert states.float().norm(dim=1).max() < 5 * states.float().norm(dim=1).median()
    assert (tmp_path / "sae.png").read_bytes().startswith(b"\x89PNG")

    written = (tmp_path / "states.safetensors").stat().st_mtime_ns
    again = run(*arguments)
    assert again.returncode == 0, again.stderr
    assert "Stored as small@2" in again.stdout
    assert (tmp_path / "states.safetensors").stat().st_mtime_ns == written


def test_the_servers_own_examples_are_there_and_change_what_is_written(bundled_server: Server) -> None:
    with httpx.Client(base_url=bundled_server.base_url, timeout=120) as client:
        until_stored(client)
        for kind, name in (
            ("vectors", "example-joy"),
            ("vectors", "example-formal"),
            ("detectors", "example-question"),
            ("dictionaries", "example-topics"),
        ):
            (stored,) = client.get(f"/v1/{kind}", params={"name": name}).json()["data"]
            assert (stored["version"], stored["shared"]) == (1, True)

        def write(*operations: object) -> str:
            body = {"prompt": "When I woke up I felt", "max_tokens": 12, "temperature": 0}
            answer = client.post("/v1/completions", json={**body, "interventions": operations}).json()
            return str(answer["choices"][0]["text"])

        joy = {
            "op": "steer",
            "at": "layers.12.output",
            "vector": {"name": "example-joy"},
            "mode": "norm_match",
        }
        assert len({write(), write({**joy, "scale": 0.3}), write({**joy, "scale": -0.3})}) == 3
        detect = {
            "op": "detect",
            "detector": "example-question",
            "where": {"positions": [-1]},
            "name": "score",
        }
        body = {
            "prompt": ["Where is the cat?", "Here is the cat."],
            "max_tokens": 1,
            "interventions": [detect],
        }
        choices = client.post("/v1/completions", json=body).json()["choices"]
        asked, told = (
            one["interventions"]["results"]["score"]["scores"][0]
            for one in sorted(choices, key=lambda one: int(one["index"]))
        )
        (detector,) = client.get("/v1/detectors", params={"name": "example-question"}).json()["data"]
        assert asked >= detector["threshold"] > told
