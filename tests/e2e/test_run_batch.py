"""``run-batch`` starts a server of its own, and its answers are those of a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import random_vector
from tests.e2e.server import PROJECT
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]


def test_a_batch_with_interventions_runs_without_a_server(tmp_path: Path) -> None:
    model = write_checkpoint("llama", tmp_path / "llama")
    hidden_size = json.loads((model / "config.json").read_text())["hidden_size"]
    steer = {"op": "steer", "at": "layers.1.output", "vector": random_vector(0, hidden_size), "scale": 8.0}
    capture = {"op": "capture", "at": "layers.1.output", "name": "c"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "The river", "max_tokens": 6}),
        ("/v1/completions", {"prompt": "The river", "max_tokens": 6, "interventions": [steer, capture]}),
        ("/v1/responses", {"input": "The river", "max_output_tokens": 6, "interventions": [capture]}),
        ("/v1/completions", {"prompt": "The river", "max_tokens": 10**6}),
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "\n".join(
            json.dumps(
                {"custom_id": str(index), "url": url, "body": {"model": "tiny", "temperature": 0} | body}
            )
            for index, (url, body) in enumerate(bodies)
        )
    )
    command = [sys.executable, "-m", "app", "run-batch", "-i", str(source), "-o", str(target), str(model)]
    command += ["--served-model-name", "tiny", "--max-model-len", "128", "--dtype", "float32"]
    run = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 1, run.stderr
    assert "1 of 4 requests failed" in run.stderr
    plain, steered, response, refused = [json.loads(one) for one in target.read_text().splitlines()]
    choice = steered["response"]["body"]["choices"][0]
    assert plain["response"]["body"]["choices"][0]["text"] != choice["text"]
    assert choice["interventions"]["results"]["c"]["positions"]
    assert response["response"]["body"]["interventions"]["results"]["c"]["positions"]
    assert (refused["response"]["status_code"], refused["error"]["param"]) == (400, "max_tokens")
