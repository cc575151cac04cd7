"""Vectors on the real model: trained from sentences, they lead where they should, by name as by numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

CHEERFUL = [
    "I love this, it is wonderful and I am so happy.",
    "What a beautiful day, everything is perfect!",
    "This film is a masterpiece, I enjoyed every minute.",
    "The food was delicious and the people were kind.",
    "I am delighted with the result, great work!",
    "She smiled, full of joy and hope.",
    "Our holiday was a dream, we laughed all the time.",
    "He is charming, generous and a pleasure to be with.",
]
GLOOMY = [
    "I hate this, it is horrible and I am so angry.",
    "What an awful day, everything is ruined!",
    "This film is a disaster, I suffered every minute.",
    "The food was disgusting and the people were rude.",
    "I am disappointed with the result, terrible work!",
    "She cried, full of pain and fear.",
    "Our holiday was a nightmare, we argued all the time.",
    "He is nasty, greedy and a burden to be with.",
]
PROMPT = "I think this movie is"
GOOD, BAD = [" great", " wonderful", " amazing"], [" terrible", " boring", " bad"]


@pytest.fixture(scope="module")
def client(bundled_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=bundled_server.base_url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def trained(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {
        method: train(client, name=method.replace("_", "-"), method=method)
        for method in ("mean_difference", "pca", "logistic")
    }


def train(client: httpx.Client, **more: object) -> dict[str, Any]:
    body = {"positive": CHEERFUL, "negative": GLOOMY, **more}
    answer = client.post("/v1/vectors/train", json=body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def complete(client: httpx.Client, *interventions: dict[str, Any], **more: object) -> dict[str, Any]:
    body = {
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 2,
        "interventions": interventions,
    }
    answer = client.post("/v1/completions", json={**body, **more})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def cheer(client: httpx.Client, *interventions: dict[str, Any]) -> float:
    """Return how much likelier the model holds good words than bad ones."""
    lens = {
        "op": "logit_lens",
        "layers": [-1],
        "targets": GOOD + BAD,
        "where": {"positions": [-1]},
        "name": "lens",
    }
    choice = complete(client, *interventions, lens, max_tokens=1)
    (row,) = choice["interventions"]["results"]["lens"]["layers"]["29"]
    found = {target["token"]: target["logprob"] for target in row["targets"]}
    return float(np.mean([found[word] for word in GOOD]) - np.mean([found[word] for word in BAD]))


def test_the_sweep_finds_a_layer_that_beats_chance(trained: dict[str, dict[str, Any]]) -> None:
    for vector in trained.values():
        training = vector["training"]
        assert vector["layers"] == list(range(30))
        best = training["layers"][training["best_layer"]]
        assert best["auroc"] >= 0.75, training
        assert best["accuracy"] >= 0.75, training


def test_names_steer_where_they_should(client: httpx.Client, trained: dict[str, dict[str, Any]]) -> None:
    plain = cheer(client)
    for vector in trained.values():
        # In the middle, where what is added has layers to act on.
        steer = {
            "op": "steer",
            "at": "layers.12.output",
            "vector": {"name": vector["name"]},
            "mode": "norm_match",
        }
        more, less = [cheer(client, {**steer, "scale": scale}) for scale in (0.15, -0.15)]
        assert less < plain - 1, (vector["name"], less, plain)
        assert plain + 1 < more, (vector["name"], plain, more)


def test_a_name_is_exactly_its_numbers(client: httpx.Client, trained: dict[str, dict[str, Any]]) -> None:
    vector = trained["mean_difference"]
    rows = safetensors.numpy.load(client.get(f"/v1/vectors/{vector['id']}/content").content)
    points = ["layers.10.output", "layers.11.output", "layers.12.output"]
    numbers = [rows[point].tolist() for point in points]
    steer = {"op": "steer", "at": "layers.10:13.output", "scale": -0.5}
    probe = {"op": "probe", "at": points, "name": "along"}
    answers = [
        complete(client, {**steer, "vector": given}, {**probe, "weights": given})
        for given in ({"name": "mean-difference@1"}, numbers, {"name": "mean-difference"})
    ]
    by_name, by_numbers, newest = answers
    for answer in (by_numbers, newest):
        assert by_name["text"] == answer["text"]
        assert by_name["logprobs"] == answer["logprobs"]
        assert by_name["interventions"]["results"] == answer["interventions"]["results"]
        fingerprints = [each["interventions"]["provenance"]["fingerprint"] for each in (by_name, answer)]
        assert fingerprints[0] == fingerprints[1] != ""
    assert by_name["text"] != complete(client)["text"]
    used = {"name": "mean-difference", "version": 1, "id": vector["id"]}
    assert [one.get("vector") for one in by_name["interventions"]["applied"]] == [used, used]
    everywhere = {
        "op": "steer",
        "at": "layers.*.output",
        "vector": {"name": "mean-difference"},
        "scale": -0.1,
    }
    assert complete(client, everywhere)["text"] != complete(client)["text"]


def test_what_vllm_refuses_is_said_of_the_prompt(client: httpx.Client) -> None:
    long = [*GLOOMY, "word " * 2000]
    body = {"name": "long", "positive": CHEERFUL, "negative": long}
    error = client.post("/v1/vectors/train", json=body)
    assert (error.status_code, error.json()["error"]["param"]) == (400, "negative.8"), error.text
    far = client.post("/v1/vectors/train", json={**body, "negative": GLOOMY, "position": -40})
    assert far.json()["error"]["code"] == "position_out_of_range", far.text
    assert client.get("/v1/vectors", params={"name": "long"}).json()["data"] == []
