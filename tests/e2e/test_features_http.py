"""Features over HTTP: an uploaded dictionary read and changed by label."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save

from tests.e2e.answers import answer, tensor_of
from tests.e2e.server import Server
from tests.narrow_model import WIDTH

pytestmark = pytest.mark.e2e

NUM_FEATURES = 64
AT = "layers.9.output"
LABELS = {"3": "cats", "9": "rain"}

Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def client(narrow_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=narrow_server.base_url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def numbers() -> dict[str, Array]:
    chance = np.random.default_rng(0)
    shapes = {
        "W_enc": (WIDTH, NUM_FEATURES),
        "b_enc": (NUM_FEATURES,),
        "W_dec": (NUM_FEATURES, WIDTH),
        "b_dec": (WIDTH,),
    }
    return {name: (chance.normal(size=shape) / 24).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def dictionary(client: httpx.Client, numbers: dict[str, Array]) -> dict[str, Any]:
    cfg = {
        "architecture": "standard",
        "d_in": WIDTH,
        "d_sae": NUM_FEATURES,
        "apply_b_dec_to_input": False,
        "metadata": {"hook_name": "blocks.9.hook_resid_post"},
    }
    reply = client.post(
        "/v1/dictionaries",
        data={"name": "ninth", "cfg": json.dumps(cfg), "labels": json.dumps(LABELS)},
        files={"weights": ("sae_weights.safetensors", save(numbers))},
    )
    assert reply.status_code == 201, reply.text
    made: dict[str, Any] = reply.json()
    return made


def encoded(numbers: dict[str, Array], x: Array) -> Array:
    found: Array = np.maximum(x @ numbers["W_enc"] + numbers["b_enc"], 0)
    return found


def test_features_are_read_by_label_and_by_rank(
    client: httpx.Client, dictionary: dict[str, Any], numbers: dict[str, Array]
) -> None:
    found = answer(
        client,
        {"op": "features", "dictionary": "ninth", "features": ["rain", 5], "name": "given"},
        {"op": "features", "dictionary": "ninth@1", "top_k": 4, "name": "top"},
        {"op": "capture", "at": AT, "dtype": "float32", "name": "x"},
        {"op": "flag", "when": {"dictionary": "ninth", "feature": "cats", "above": 0.5}, "name": "cats"},
    )["interventions"]
    results = found["results"]
    activations = encoded(numbers, tensor_of(results["x"]["points"][AT]))
    assert results["given"]["positions"] == [*range(len(activations))]
    for own, given, top in zip(
        activations, results["given"]["features"], results["top"]["features"], strict=True
    ):
        assert [(one["id"], one["label"]) for one in given] == [(9, "rain"), (5, None)]
        np.testing.assert_allclose([one["activation"] for one in given], own[[9, 5]], rtol=1e-2, atol=1e-2)
        strongest = np.sort(own)[::-1][:4]
        np.testing.assert_allclose([one["activation"] for one in top], strongest, rtol=1e-2, atol=1e-2)
        assert all(one["label"] == LABELS.get(str(one["id"])) for one in top)
    near = {index for index, own in enumerate(activations) if abs(own[3] - 0.5) < 1e-2}
    wanted = {index for index, own in enumerate(activations) if own[3] > 0.5}
    assert set(results["cats"]["positions"]) ^ wanted <= near
    used = [{"name": "ninth", "version": 1, "id": dictionary["id"]}]
    assert [one.get("dictionaries") for one in found["applied"]] == [used, used, None, used]


def test_a_change_moves_the_value_along_the_feature(
    client: httpx.Client, dictionary: dict[str, Any], numbers: dict[str, Array]
) -> None:
    change = {
        "op": "feature",
        "dictionary": {"name": "ninth", "id": dictionary["id"]},
        "changes": [{"feature": "cats", "value": 40.0}, {"feature": 7, "mode": "ablate"}],
    }
    read = {"op": "capture", "at": AT, "dtype": "float32"}
    found = answer(client, {**read, "name": "before"}, change, {**read, "name": "after"})
    results = found["interventions"]["results"]
    before, after = (tensor_of(results[name]["points"][AT]) for name in ("before", "after"))
    old = encoded(numbers, before)
    expected = (40 - old[:, 3:4]) * numbers["W_dec"][3] - old[:, 7:8] * numbers["W_dec"][7]
    # The model computes in its own dtype: what is added is rounded at the size of the values.
    rounding = np.abs(before).max(axis=1, keepdims=True) / 100 + 0.05
    assert (np.abs(after - before - expected) < rounding).all()
