"""Sweeps on the real model: each cell is what a single request gives, and a client that leaves ends them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import numpy as np
import pytest

from tests.e2e.answers import tensor_of
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

CLEAN: Final = "The capital of France is the city of"
CORRUPTED: Final = "The capital of Italy is the city of"
LAYERS: Final = [3, 29]
PAIR: Final = {"prompts": [{"clean": CLEAN, "corrupted": CORRUPTED}]}
LOGPROB: Final = {"type": "logprob", "token": " Paris"}
LAST: Final = {"positions": [-1]}
READ: Final = {"op": "logit_lens", "layers": [-1], "top_k": 0, "targets": [" Paris"], "where": LAST}


@pytest.fixture(scope="module")
def client(bundled_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=bundled_server.base_url, timeout=300) as client:
        deadline = time.monotonic() + 120
        while not client.get("/v1/dictionaries").json()["data"]:  # stored once the engine is ready
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield client


def swept(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/sweeps", json={**PAIR, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["num_failed"] == 0
    return found


def single(client: httpx.Client, prompt: str, *operations: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "interventions": [*operations], **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    found: dict[str, Any] = choice
    return found


def results(client: httpx.Client, prompt: str, *operations: dict[str, Any]) -> dict[str, Any]:
    read = {**operations[-1], "name": "read"}
    found: dict[str, Any] = single(client, prompt, *operations[:-1], read)["interventions"]["results"]
    return found


def logprob(client: httpx.Client, prompt: str, *operations: dict[str, Any]) -> float:
    (row,) = results(client, prompt, *operations, READ)["read"]["layers"]["29"]
    return float(row["targets"][0]["logprob"])


def check(found: dict[str, Any], one: Callable[..., float], side: str = "values") -> None:
    """Compare each cell with a single request, which is made from the labels of the cell."""
    values = tensor_of(found[side])
    assert values.shape == tuple(len(found["coords"][name]) for name in found["dims"])
    for index in np.ndindex(*values.shape):
        labels = [found["coords"][name][at] for name, at in zip(found["dims"], index, strict=True)]
        assert values[index] == pytest.approx(one(*labels), abs=1e-4), labels


def rows(client: httpx.Client, prompt: str, point: str, position: int) -> Any:
    capture = {"op": "capture", "at": point, "where": {"positions": [position]}, "dtype": "float32"}
    return tensor_of(results(client, prompt, capture)["read"]["points"][point]).reshape(-1)


def patch(point: str, position: int, values: Any) -> dict[str, Any]:
    where = {"positions": [position]}
    return {"op": "patch", "at": point, "values": [values.tolist()], "where": where}


def test_patches_of_layers_and_positions_and_their_baselines(client: httpx.Client) -> None:
    found = swept(client, method="patch", layers=LAYERS, positions=[3, -1], metric=LOGPROB)
    assert found["coords"] == {"layer": LAYERS, "position": [3, 7]}

    def one(layer: int, position: int) -> float:
        point = f"layers.{layer}.output"
        return logprob(client, CORRUPTED, patch(point, position, rows(client, CLEAN, point, position)))

    check(found, one)
    (baseline,) = found["baselines"]
    assert baseline["clean"] == pytest.approx(logprob(client, CLEAN), abs=1e-4)
    assert baseline["corrupted"] == pytest.approx(logprob(client, CORRUPTED), abs=1e-4)
    assert baseline["unsteered"] == baseline["corrupted"]
    # The last layer's value at the last position is all that the answer comes from.
    assert tensor_of(found["values"])[1, 1] == pytest.approx(baseline["clean"], abs=1e-4)
    assert found["tokens"][0][3] == " Italy"


def test_patches_of_heads_in_the_other_direction(client: httpx.Client) -> None:
    point = "layers.15.attn.heads"
    found = swept(
        client, method="patch", direction="corrupted_to_clean", points=["layers.{layer}.attn.heads"],
        layers=[15], heads=[0, 8], positions="last", metric=LOGPROB,
    )  # fmt: skip

    def one(layer: int, head: int, position: int) -> float:
        assert (layer, position) == (15, 7)
        values = rows(client, CLEAN, point, position).copy()
        part = slice(head * 64, (head + 1) * 64)
        values[part] = rows(client, CORRUPTED, point, position)[part]
        return logprob(client, CLEAN, patch(point, position, values))

    check(found, one)


@pytest.mark.parametrize("ablation", ["zero", "mean"])
def test_ablations(client: httpx.Client, ablation: str) -> None:
    found = swept(
        client, method="ablate", ablation=ablation, layers=LAYERS, metric=LOGPROB,
        points=["layers.{layer}.attn.output", "layers.{layer}.mlp.output"], where={"range": [1, None]},
    )  # fmt: skip

    def one(point: str, layer: int) -> float:
        at, where = point.replace("{layer}", str(layer)), {"range": [1, None]}
        return logprob(client, CLEAN, {"op": "ablate", "at": at, "method": ablation, "where": where})

    check(found, one)


def test_ablations_of_heads_and_a_difference(client: httpx.Client) -> None:
    metric = {"type": "logit_difference", "token": " Paris", "other": " Rome"}
    found = swept(
        client,
        method="ablate",
        points=["layers.{layer}.attn.heads"],
        layers=[20],
        heads=[1, 7],
        metric=metric,
    )
    read = {**READ, "targets": [" Paris", " Rome"]}

    def one(layer: int, head: int) -> float:
        units = [*range(head * 64, (head + 1) * 64)]
        ablate = {"op": "ablate", "at": f"layers.{layer}.attn.heads", "units": units}
        (row,) = results(client, CLEAN, ablate, read)["read"]["layers"]["29"]
        first, second = row["targets"]
        return float(first["logprob"] - second["logprob"])

    check(found, one)


def test_steering_beside_a_random_direction_by_its_divergence(client: httpx.Client) -> None:
    body = {
        "method": "steer", "vector": "example-joy", "layers": [10, 20], "strengths": [0, 4],
        "positions": None, "metric": {"type": "kl"}, "control": True, "seed": 3,
    }  # fmt: skip
    found = swept(client, **body)

    def distribution(*operations: dict[str, Any]) -> Any:
        capture = {"op": "capture", "at": "logits", "where": LAST, "dtype": "float32"}
        (tensor,) = results(client, CLEAN, *operations, capture)["read"]["points"].values()
        logits = tensor_of(tensor)[-1].astype(np.float64)
        return logits - np.logaddexp.reduce(logits)

    plain = distribution()

    def one(layer: int, strength: float) -> float:
        steer = {"op": "steer", "at": f"layers.{layer}.output", "vector": "example-joy", "scale": strength}
        return float(np.exp(plain) @ (plain - distribution(steer)))

    check(found, one)
    values, control = tensor_of(found["values"]), tensor_of(found["control"])
    assert np.abs(control[:, 0]).max() < 1e-4
    assert (control[:, 1] > 0).all()
    assert not np.allclose(control[:, 1], values[:, 1])
    again = tensor_of(swept(client, **body)["control"])
    assert again == pytest.approx(control, abs=1e-4)


def test_features_by_their_activation_and_a_detector(client: httpx.Client) -> None:
    dictionary, where = "example-topics", {"exclude": {"positions": [0]}}
    metric = {"type": "feature", "dictionary": dictionary, "feature": "law"}
    grid = {"method": "feature", "dictionary": dictionary, "features": ["law", 123], "values": [0, 60]}
    found = swept(client, **grid, where=where, metric=metric)

    def change(feature: Any, value: float) -> dict[str, Any]:
        changes = [{"feature": feature, "value": value}]
        return {"op": "feature", "dictionary": dictionary, "changes": changes, "where": where}

    def activation(feature: Any, value: float) -> float:
        read = {"op": "features", "dictionary": dictionary, "features": ["law"], "where": LAST}
        (row,) = results(client, CLEAN, change(feature, value), read)["read"]["features"]
        return float(row[0]["activation"])

    check(found, activation)
    detected = swept(client, **grid, where=where, metric={"type": "detector", "detector": "example-question"})

    def score(feature: Any, value: float) -> float:
        read = {"op": "detect", "detector": "example-question", "where": LAST}
        return float(results(client, CLEAN, change(feature, value), read)["read"]["scores"][0])

    check(detected, score)


def test_perplexity_of_a_continuation_and_several_prompts(client: httpx.Client) -> None:
    chat = [{"role": "user", "content": "Name a city."}]
    ids = [one["id"] for one in client.post("/v1/tokenize", json={"prompt": CORRUPTED}).json()["tokens"]]
    found = swept(
        client, method="steer", vector="example-joy", layers=[12], strengths=[0, 3, 9],
        prompts=[{"clean": CLEAN}, {"clean": ids}, {"clean": chat}],
        metric={"type": "perplexity", "continuation": " Paris, of course."},
    )  # fmt: skip
    assert found["dims"] == ["prompt", "layer", "strength"]
    prompts = [CLEAN, CORRUPTED]
    counts = [
        len(client.post("/v1/tokenize", json={"prompt": text}).json()["tokens"])
        for text in (CLEAN, f"{CLEAN} Paris, of course.")
    ]

    def one(prompt: int, layer: int, strength: float) -> float:
        steer = {"op": "steer", "at": f"layers.{layer}.output", "vector": "example-joy", "scale": strength}
        text = f"{prompts[prompt]} Paris, of course."
        rows = single(client, text, steer, prompt_logprobs=0)["prompt_logprobs"][counts[0] : counts[1]]
        return math.exp(-float(np.mean([next(iter(row.values()))["logprob"] for row in rows])))

    values = tensor_of(found["values"])
    assert np.isfinite(values[2]).all()
    for index in np.ndindex(2, 1, 3):
        expected = one(index[0], 12, [0, 3, 9][index[2]])
        assert values[index] == pytest.approx(expected, rel=1e-4), index


def test_a_streamed_sweep_and_one_that_overflows(client: httpx.Client) -> None:
    vector = [1e30] * 576
    body = {
        **PAIR,
        "method": "steer",
        "vector": vector,
        "layers": [10],
        "strengths": [0, 1e30],
        "stream": True,
    }
    answer = client.post("/v1/sweeps", json={**body, "metric": LOGPROB})
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    assert parts.pop() == "[DONE]"
    *progress, last = map(json.loads, parts)
    assert [(one["done"], one["total"]) for one in progress] == [(2, 2)]
    found = last["sweep"]
    values = tensor_of(found["values"])[0]
    assert values[0] == pytest.approx(logprob(client, CLEAN), abs=1e-4)
    assert np.isnan(values[1])
    (failed,) = found["failed"]
    assert (failed["index"], failed["code"]) == ([0, 1], "not_finite")


def test_a_client_that_leaves_leaves_nothing_running(client: httpx.Client) -> None:
    body: dict[str, Any] = {**PAIR, "method": "ablate", "positions": "all", "heads": "all", "metric": LOGPROB}
    body |= {"points": ["layers.{layer}.attn.heads"], "stream": True}
    with client.stream("POST", "/v1/sweeps", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                assert json.loads(line.removeprefix("data: "))["total"] == 30 * 9 * 8
                break
    deadline = time.monotonic() + 30
    # This request itself is not counted.
    while client.get("/v1/status").json()["in_flight"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    metrics = client.get("/metrics").text
    running = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
    assert all(float(line.rsplit(" ", 1)[1]) == 0 for line in running), running


def test_what_is_refused_says_which_field(client: httpx.Client) -> None:
    pair = [{"clean": CLEAN, "corrupted": "The capital of Liechtenstein is the city of"}]
    patched = {"method": "patch", "metric": LOGPROB}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({**patched, "prompts": pair}, "invalid_value", "prompts.0.corrupted"),
        ({**patched, "metric": {**LOGPROB, "token": "two tokens"}}, "unknown_token", "metric.token"),
        ({**patched, "metric": {**LOGPROB, "token": 10**6}}, "unknown_token", "metric.token"),
        ({**patched, "points": ["norm.output"]}, "unsupported_at_point", "points.0"),
        ({**patched, "points": ["layers.{layer}.attn.pattern"]}, "unsupported_at_point", "points.0"),
        ({**patched, "prompts": [{"clean": [10**6], "corrupted": [1]}]}, "unknown_token", "prompts.0.clean"),
        ({"method": "steer", "metric": LOGPROB, "vector": [1.0], "strengths": [1]}, "wrong_width", "vector"),
    ]
    for body, code, param in cases:
        error = client.post("/v1/sweeps", json={**PAIR, **body}).json()["error"]
        assert (error["code"], error["param"]) == (code, param), error
