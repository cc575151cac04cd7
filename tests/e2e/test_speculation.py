"""A server with speculative decoding: results as without drafts, and how many drafts were accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from tests.e2e.answers import tensor_of
from tests.e2e.server import Server
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

PROMPT = list(range(20, 31))
NUM_TOKENS = 24
POINT = "layers.2.output"
CAPTURE = {"op": "capture", "name": "seen", "at": POINT}
SAMPLES = {"op": "capture", "name": "ids", "at": "samples"}
LENS = {"op": "logit_lens", "name": "lens", "layers": [2], "top_k": 2}
STEER = {"op": "steer", "at": "layers.1.output", "vector": [0.02] * 128}
OPERATIONS: list[dict[str, Any]] = [STEER, CAPTURE, SAMPLES, LENS]
UNDRAFTED = {"op": "probe", "name": "p", "at": POINT, "weights": [0.0] * 128, "where": {"range": [0, 20]}}
"""Depends on the positions of generated tokens, so that its request takes no drafts, and changes nothing."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    variables = {"VLLM_LOGGING_LEVEL": "INFO"}
    model = write_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    arguments = ["--speculative-config", json.dumps(drafts), "--served-model-name", "tiny"]
    arguments += ["--dtype", "float32", "--max-model-len", "128"]
    with Server(str(model), arguments=arguments, environment=variables) as started:
        assert "Using V2 Model Runner" in started.whole_output()
        yield started


def completion(server: Server, operations: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "interventions": operations,
        **more,
    }
    response = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def tensor(choice: dict[str, Any], name: str, point: str) -> npt.NDArray[Any]:
    return tensor_of(choice["interventions"]["results"][name]["points"][point])


def counted(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.base_url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_results_equal_those_without_drafts_and_drafts_are_counted(server: Server) -> None:
    drafted, alone = completion(server, OPERATIONS), completion(server, [*OPERATIONS, UNDRAFTED])
    assert drafted["text"] == alone["text"]
    seen, wanted = (tensor(choice, "seen", POINT) for choice in (drafted, alone))
    np.testing.assert_allclose(seen, wanted, rtol=1e-4, atol=1e-3)
    ids = tensor(drafted, "ids", "samples")
    assert ids.tolist() == tensor(alone, "ids", "samples").tolist()
    assert len(ids) == NUM_TOKENS
    lenses = [choice["interventions"]["results"]["lens"] for choice in (drafted, alone)]
    assert lenses[0]["positions"] == lenses[1]["positions"]
    assert drafted["interventions"]["applied"] == alone["interventions"]["applied"][: len(OPERATIONS)]

    provenance = drafted["interventions"]["provenance"]
    num_accepted = provenance["drafted_rows"] - provenance["refused_rows"]
    assert num_accepted > 0
    assert counted(server, "vllm:spec_decode_num_draft_tokens_total") == provenance["drafted_rows"]
    # vLLM also counts accepted drafts behind the last token.
    assert counted(server, "vllm:spec_decode_num_accepted_tokens_total") >= num_accepted
    assert alone["interventions"]["provenance"]["drafted_rows"] == 0


def test_results_end_where_a_stop_string_ends_the_text(server: Server) -> None:
    whole = completion(server, [SAMPLES])
    stopped = completion(server, [SAMPLES, CAPTURE], stop=[whole["text"][len(whole["text"]) // 2 :][:4]])
    assert stopped["finish_reason"] == "stop"
    num_tokens = len(tensor(stopped, "ids", "samples"))
    assert 0 < num_tokens < NUM_TOKENS
    assert len(tensor(stopped, "seen", POINT)) == len(PROMPT) + num_tokens - 1


def test_a_trace_runs_without_drafts(server: Server) -> None:
    code = "ids = save([])\nfor _ in tracer.iter[:]:\n    ids.append(model.samples.output.item())"
    before = counted(server, "vllm:spec_decode_num_draft_tokens_total")
    choice = completion(server, [{"op": "trace", "name": "t", "code": code}])
    assert len(choice["interventions"]["results"]["t"]["saves"]["ids"]) == NUM_TOKENS
    assert counted(server, "vllm:spec_decode_num_draft_tokens_total") == before
