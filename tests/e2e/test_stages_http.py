"""A server over two pipeline stages, compared with transformers on the same weights."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.server import Server
from tests.families.checkpoints import NUM_LAYERS, write_checkpoint
from tests.hook_reference import edited, first, on_first, outputs_of

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

PROMPT = list(range(20, 31))
POINTS = [f"layers.{layer}.output" for layer in range(NUM_LAYERS)]
WIDTH = 128
STEER: dict[str, Any] = {"op": "steer", "at": "layers.0.output", "vector": [0.05] * WIDTH}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    arguments = ["--pipeline-parallel-size", "2", "--served-model-name", "tiny", "--dtype", "float32"]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with Server(
        str(checkpoint), arguments=[*arguments, "--max-model-len", "128"], environment=environment
    ) as started:
        yield started


@pytest.fixture(scope="module")
def hidden(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return each layer's output at the prompt, plain and steered at the first layer."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    layers = [f"model.layers.{layer}" for layer in range(NUM_LAYERS)]

    def run() -> torch.Tensor:
        with torch.no_grad():
            outputs = outputs_of(model, {"input_ids": torch.tensor([PROMPT])}, *layers)
        return torch.stack([first(output)[0] for output in outputs])

    plain = run()
    with edited(model, layers[0], on_first(lambda rows: rows + 0.05)):
        steered = run()
    return {"plain": plain, "steered": steered}


def ask(server: Server, operations: list[dict[str, Any]], **more: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **more}
    body["interventions"] = operations
    return httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=120)


def results(server: Server, operations: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    response = ask(server, operations, **more)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]["interventions"]["results"]
    return found


def tensor(result: dict[str, Any], point: str) -> npt.NDArray[np.float32]:
    found = result["points"][point]
    return np.frombuffer(base64.b64decode(found["data"]), np.float32).reshape(found["shape"])


def test_values_of_all_stages_are_those_of_the_model(server: Server, hidden: dict[str, torch.Tensor]) -> None:
    capture: dict[str, Any] = {"op": "capture", "name": "c", "at": "layers.*.output"}
    capture["where"] = {"phase": "prompt"}
    for name, operations in (("plain", [capture]), ("steered", [STEER, capture])):
        found = results(server, operations)["c"]
        for layer, point in enumerate(POINTS):
            np.testing.assert_allclose(tensor(found, point), hidden[name][layer], rtol=1e-3, atol=1e-3)


def test_reads_inside_layers_probes_and_patterns_come_from_both_stages(server: Server) -> None:
    operations: list[dict[str, Any]] = [
        {"op": "capture", "name": "pattern", "at": "layers.*.attn.pattern", "where": {"positions": [10]}},
        {"op": "capture", "name": "mean", "at": ["layers.0.mlp.output", POINTS[-1]], "reduce": "mean"},
        {"op": "probe", "name": "probe", "at": "layers.*.output", "weights": [1.0] * WIDTH},
        {"op": "capture", "name": "all", "at": "layers.*.output"},
    ]
    found = results(server, operations)
    assert len(found["pattern"]["points"]) == NUM_LAYERS
    for point in found["pattern"]["points"]:
        np.testing.assert_allclose(tensor(found["pattern"], point).sum(-1), 1, atol=1e-5)
    for point in POINTS:
        rows = tensor(found["all"], point)
        scores = np.asarray(found["probe"]["points"][point], np.float32)
        np.testing.assert_allclose(scores, rows.sum(-1), rtol=1e-3, atol=1e-2)
    rows = tensor(found["all"], POINTS[-1])
    np.testing.assert_allclose(tensor(found["mean"], POINTS[-1]), rows.mean(0), rtol=1e-3, atol=1e-4)


def test_the_lens_reads_early_stages_with_the_unembedding_of_the_last(
    server: Server, checkpoint: Path, hidden: dict[str, torch.Tensor]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    lens = {"op": "logit_lens", "name": "lens", "layers": "all", "top_k": 1, "where": {"phase": "prompt"}}
    found = results(server, [lens])["lens"]
    with torch.no_grad():
        wanted = model.lm_head(model.model.norm(hidden["plain"])).argmax(-1)
    for layer, top in enumerate(wanted.tolist()):
        assert [place["top"][0]["id"] for place in found["layers"][str(layer)]] == top


def test_a_patch_on_an_early_stage_changes_its_own_request_only(server: Server) -> None:
    patch = {"op": "patch", "at": POINTS[0], "values": [[0.0] * WIDTH], "where": {"positions": [2]}}
    plain = ask(server, []).json()["choices"][0]["text"]
    assert ask(server, [patch]).json()["choices"][0]["text"] != plain
    assert ask(server, []).json()["choices"][0]["text"] == plain


def test_blocks_read_and_write_both_stages(server: Server) -> None:
    code = (
        "early = model.model.layers[0].mlp.output.save()\n"
        "model.model.layers[3].mlp.output[:] = early\n"
        "late = model.model.layers[3].mlp.output.save()"
    )
    saves = results(server, [{"op": "trace", "name": "t", "code": code}])["t"]["saves"]
    assert saves["early"]["data"] == saves["late"]["data"]


def test_a_stream_brings_the_values_of_both_stages_with_each_token(server: Server) -> None:
    capture = {"op": "capture", "name": "c", "at": [POINTS[0], POINTS[-1]], "where": {"phase": "generated"}}
    whole = results(server, [capture])["c"]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "stream": True}
    url = f"{server.base_url}/v1/completions"
    parts = []
    with httpx.stream("POST", url, json=body | {"interventions": [capture]}, timeout=120) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                (choice,) = event["choices"]
                parts.append((choice.get("interventions") or {}).get("results", {}).get("c"))
    rows = {point: [tensor(part, point) for part in parts if part] for point in (POINTS[0], POINTS[-1])}
    for point, found in rows.items():
        assert len(found) > 1
        np.testing.assert_array_equal(np.concatenate(found), tensor(whole, point))
