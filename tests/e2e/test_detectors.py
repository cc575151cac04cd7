"""Detectors on the real model: trained from sentences, they tell new ones apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from app.catalog.detector_files import stored_detector
from app.catalog.training import auroc
from nnsight_engine.core.detector import Detector
from tests.e2e.answers import tensor_of
from tests.e2e.server import Server
from tests.e2e.test_vectors import CHEERFUL, GLOOMY

pytestmark = pytest.mark.e2e

NEW_CHEERFUL = [
    "The concert was fantastic, we danced all night.",
    "Thank you so much, you made my day!",
    "This is the best book that I have ever read.",
    "The garden is lovely and the sun is shining.",
    "Congratulations, that is brilliant news!",
    "He laughed, happy to be home at last.",
]
NEW_GLOOMY = [
    "The concert was dreadful, we left after an hour.",
    "Leave me alone, you ruined my day!",
    "This is the worst book that I have ever read.",
    "The garden is ugly and the rain is endless.",
    "I am sorry, that is terrible news.",
    "He wept, lost and miserable far from home.",
]


@pytest.fixture(scope="module")
def client(bundled_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=bundled_server.base_url, timeout=120) as client:
        yield client


def train(client: httpx.Client, **more: object) -> dict[str, Any]:
    body = {"name": "cheer", "positive": CHEERFUL, "negative": GLOOMY, "position": "mean", **more}
    answer = client.post("/v1/detectors/train", json=body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def detector_of(client: httpx.Client, made: dict[str, Any]) -> Detector:
    return stored_detector(client.get(f"/v1/detectors/{made['id']}/content").content)


def scores_of(client: httpx.Client, detector: Detector, texts: list[str]) -> Any:
    """Return the detector's score of each text, from the values that training reads too."""
    points = [part.point for part in detector.parts]
    where = {"phase": "prompt", "range": [1, None]}
    capture = {
        "op": "capture",
        "at": points,
        "dtype": "float32",
        "reduce": "mean",
        "name": "x",
        "where": where,
    }
    body = {"prompt": texts, "max_tokens": 1, "interventions": [capture]}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = [choice["interventions"]["results"]["x"]["points"] for choice in answer.json()["choices"]]
    values = {point: np.stack([tensor_of(one[point]) for one in found]) for point in points}
    return detector.scores(values)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("layers", ["best", "10:14"])
def test_a_trained_detector_tells_new_texts_apart(client: httpx.Client, kind: str, layers: str) -> None:
    made = train(client, kind=kind, layers=layers)
    assert made["training"]["auroc"] >= 0.75, made
    detector = detector_of(client, made)
    assert len(detector.parts) == (1 if layers == "best" else 4)
    new = [scores_of(client, detector, side) for side in (NEW_CHEERFUL, NEW_GLOOMY)]
    assert auroc(*new) > 0.75, new
    seen = [scores_of(client, detector, side) for side in (CHEERFUL, GLOOMY)]
    assert auroc(*seen) > 0.9, seen
    right = int((seen[0] >= made["threshold"]).sum() + (seen[1] < made["threshold"]).sum())
    assert right > 0.8 * (len(CHEERFUL) + len(GLOOMY)), (made["threshold"], seen)


def test_a_probe_of_the_weights_is_the_detector_before_its_link(client: httpx.Client) -> None:
    made = train(client, layers="12", position=-1)
    (part,) = detector_of(client, made).parts
    probe = {
        "op": "probe",
        "at": part.point,
        "weights": part.tensors["weights"].tolist(),
        "bias": made["bias"],
    }
    where = {"positions": [-1]}
    capture = {"op": "capture", "at": part.point, "dtype": "float32", "name": "x", "where": where}
    body = {"prompt": NEW_CHEERFUL[0], "max_tokens": 1, "interventions": [capture, {**probe, "where": where}]}
    results = client.post("/v1/completions", json=body).json()["choices"][0]["interventions"]["results"]
    values = tensor_of(results["x"]["points"][part.point])
    (score,) = detector_of(client, made).scores({part.point: values})
    (logit,) = results["probe_1"]["points"][part.point]
    assert 1 / (1 + np.exp(-logit)) == pytest.approx(score, rel=1e-2, abs=1e-3)


def test_a_detector_can_be_uploaded_again(client: httpx.Client) -> None:
    made = train(client, kind="mlp", hidden=8, layers=[8, 20])
    content = client.get(f"/v1/detectors/{made['id']}/content").content
    assert safetensors.numpy.load(content)["parts.1.hidden_weights"].shape == (8, 576)
    files = {"file": ("cheer.safetensors", content)}
    again = client.post("/v1/detectors", data={"name": "copy"}, files=files).json()
    assert again["sha256"] == made["sha256"]
    narrow = {"parts": [{"at": "layers.3.output", "form": "linear", "weights": [1.0] * 575}]}
    refused = client.post("/v1/detectors", json={"name": "narrow", **narrow})
    assert refused.json()["error"]["code"] == "wrong_width"
    for at in ("layers.3.attn.pattern", "samples"):
        part = {"at": at, "form": "linear", "weights": [1.0] * 576}
        refused = client.post("/v1/detectors", json={"name": "narrow", "parts": [part]})
        assert refused.json()["error"]["code"] == "unsupported_at_point", (at, refused.text)
    assert client.get("/v1/detectors", params={"name": "narrow"}).json()["data"] == []
    queries = {"parts": [{"at": "layers.3.attn.q", "form": "linear", "weights": [0.5] * 576}]}
    assert client.post("/v1/detectors", json={"name": "queries", **queries}).status_code == 201
