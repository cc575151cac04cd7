"""Detectors, conditions and features on the page with the real model: it shows what the API answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from playwright.sync_api import Page, expect

from tests.e2e.server import Server
from tests.playground.conftest import Open, link, press, shoot, view_of
from tests.playground.test_views import GLAD, SAD, asked, column, tokens, visible

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

PROMPT = "The film was awful, but then"
NUM_TOKENS = 12
GIVEN: dict[str, Any] = {"prompt": PROMPT, "sampling": {"maxTokens": NUM_TOKENS}}
WIDTH, NUM_FEATURES = 576, 2048
LAYER = 12
LABELS = {str(feature): f"made up, number {feature}" for feature in range(0, NUM_FEATURES, 2)}
JOY = {"op": "steer", "at": "layers.15.output", "vector": {"name": "joy"}, "mode": "norm_match", "scale": 0.4}
STEER = {"vector": "joy", "layers": "15", "mode": "norm_match", "scale": 0.4}


def dictionary() -> dict[str, Any]:
    chance = np.random.default_rng(5)
    directions = chance.normal(size=(NUM_FEATURES, WIDTH)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    weights = {
        "W_enc": np.ascontiguousarray(directions.T),
        "W_dec": directions,
        "b_enc": np.full(NUM_FEATURES, -1.0, np.float32),
        "b_dec": np.zeros(WIDTH, np.float32),
    }
    cfg = {
        "architecture": "standard",
        "d_in": WIDTH,
        "d_sae": NUM_FEATURES,
        "dtype": "float32",
        "apply_b_dec_to_input": False,
        "normalize_activations": "none",
        "metadata": {"sae_lens_version": "6.21.0", "hook_name": f"blocks.{LAYER}.hook_resid_post"},
    }
    return {
        "files": {"weights": ("w", safetensors.numpy.save(weights)), "cfg": ("c", json.dumps(cfg).encode())},
        "data": {"name": "random", "labels": json.dumps(LABELS)},
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Serve the bundled model with a vector, a detector and a dictionary, in float32."""
    with Server(arguments=["--max-model-len", "512", "--dtype", "float32"]) as server:
        prompts = {"positive": GLAD, "negative": SAD, "position": "mean"}
        for kind, name, more in (("vectors", "joy", {}), ("detectors", "glad", {"layers": [10]})):
            body = {"name": name, **prompts, **more}
            answer = httpx.post(f"{server.base_url}/v1/{kind}/train", json=body, timeout=60)
            assert answer.status_code < 300, answer.text
        answer = httpx.post(f"{server.base_url}/v1/dictionaries", **dictionary(), timeout=60)
        assert answer.status_code < 300, answer.text
        yield server


def answered(server: Server, *operations: dict[str, Any]) -> Any:
    found = asked(server, prompt=PROMPT, max_tokens=NUM_TOKENS, interventions=list(operations))
    return found["choices"][0]


def listbox(page: Page, name: str) -> Any:
    return page.get_by_role("listbox", name=name).get_by_role("option")


def test_scores_flags_and_conditions_are_those_of_the_api(server: Server, open_page: Open) -> None:
    detect = {"op": "detect", "detector": "glad", "name": "scores"}
    scores = answered(server, detect)["interventions"]["results"]["scores"]
    bound = float(np.median(scores["scores"]))
    when = {"detector": "glad", "below": bound}
    test = {"detector": "glad", "side": "below", "bound": str(bound)}
    steering = [STEER | {"when": {"tests": [test]}}]
    marks = [{"op": "flag", "name": "sad", "when": {"tests": [test]}}]
    page = open_page(link(server.base_url, **GIVEN, steering=steering, marks=marks, watched=["glad"]))
    press(page, "Run")
    expect(view_of(page).get_by_role("alert")).to_have_count(0)
    flag = {"op": "flag", "when": when, "name": "sad"}
    for name, operations in (("Baseline", []), ("Steered", [JOY | {"when": when}])):
        answer = answered(server, *operations, detect, flag)
        results = answer["interventions"]["results"]
        assert column(page, name).text_content() == answer["text"]
        shown = listbox(page, f"{name}: scores of tokens")
        texts = shown.locator(".token").all_text_contents()
        assert texts[: len(tokens(server, PROMPT))] == [visible(text) for text in tokens(server, PROMPT)]
        numbers = shown.locator(".number").all_text_contents()
        assert len(numbers) == len(texts) == len(results["scores"]["positions"]) + 1
        assert [float(text) for text in numbers[:-1]] == pytest.approx(results["scores"]["scores"], abs=0.006)
        held = results["sad"]["positions"]
        assert [at for at, text in enumerate(shown.all_text_contents()) if "sad holds" in text] == held
        assert 0 < len(held) < len(texts)
        acted = answer["interventions"]["applied"][0]["positions"] if operations else []
        assert [at for at, text in enumerate(shown.all_text_contents()) if "by joy holds" in text] == acted
    assert column(page, "Baseline").text_content() != column(page, "Steered").text_content()
    shoot(page, "conditions-engine")


def test_a_stop_ends_the_steered_text(server: Server, open_page: Open) -> None:
    test = {"detector": "glad", "bound": "-100", "over": "window", "of": 4, "reduce": "mean"}
    mark = {
        "op": "stop",
        "when": {"tests": [test]},
        "where": {"range": f"{len(tokens(server, PROMPT)) + 3}:"},
    }
    page = open_page(link(server.base_url, **GIVEN, marks=[mark]))
    press(page, "Run")
    expect(page.get_by_role("article", name="Steered")).to_contain_text("Ended by “stop 1”.")
    whole, part = (column(page, name).text_content() or "" for name in ("Baseline", "Steered"))
    assert whole.startswith(part)
    assert 0 < len(part) < len(whole)


def test_features_are_those_of_the_api(server: Server, open_page: Open) -> None:
    page = open_page(link(server.base_url, view="features", **GIVEN, features={"topK": 4}))
    press(page, "Read the features")
    top = {"op": "features", "dictionary": "random", "top_k": 4, "name": "top"}
    results = answered(server, top)["interventions"]["results"]["top"]
    list_of = page.get_by_role("group", name="The token").get_by_role("listitem")
    place = 2
    view_of(page).get_by_role("listbox").get_by_role("option").nth(place).click()
    told = results["features"][place]
    names = [f"{one['label']} ({one['id']})" if one["label"] else f"feature {one['id']}" for one in told]
    assert any(one["label"] for row in results["features"] for one in row)
    assert list_of.locator(".name").all_text_contents() == names
    values = [float(text) for text in list_of.locator(".value").all_text_contents()]
    assert values == pytest.approx([one["activation"] for one in told], abs=0.06)
    list_of.first.get_by_role("button", name="Colour").click()
    expect(page.get_by_role("heading", name=f"Activation of {names[0]}")).to_be_visible()
    view_of(page).get_by_text("Running…").wait_for(state="hidden")
    one = {"op": "features", "dictionary": "random", "features": [told[0]["id"]], "name": "one"}
    alone = answered(server, one)["interventions"]["results"]["one"]["features"]
    labels = [
        each.get_attribute("aria-label")
        for each in view_of(page).get_by_role("listbox").get_by_role("option").all()
    ]
    coloured = [float((label or "").rpartition(": ")[2]) for label in labels[: len(alone)]]
    assert coloured == pytest.approx([row[0]["activation"] for row in alone], abs=0.06)
    shoot(page, "features-engine")

    list_of.first.get_by_role("button", name="Slider").click()
    page.get_by_label("Activation, as a number").fill("300")
    page.get_by_role("navigation", name="Views").get_by_role("button", name="Compare").click()
    press(page, "Run")
    changes = [{"feature": told[0]["id"], "mode": "set", "value": 300.0}]
    feature = {"op": "feature", "dictionary": "random", "changes": changes}
    assert column(page, "Baseline").text_content() == answered(server)["text"]
    assert column(page, "Steered").text_content() == answered(server, feature)["text"]
    assert answered(server)["text"] != answered(server, feature)["text"]
    expect(view_of(page).get_by_text("Steered at")).to_contain_text("positions of 1 place")
