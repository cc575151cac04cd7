"""Features of dictionaries on the page, on a server with a made-up model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.integration import dictionary_files
from tests.playground.conftest import Open, copied, faults, is_too_wide, link, press, shoot, view_of
from tests.playground.test_conditions import requests_of
from tests.playground.test_page import STEERED, VECTOR, Playground, playground, serve

pytestmark = pytest.mark.heavy

__all__ = ["playground", "serve"]  # fixtures

PROMPT = "one two three four"
VIEW: dict[str, Any] = {"view": "features", "prompt": PROMPT, "sampling": {"maxTokens": 4}}
LABELS = {"0": "numbers in words", "2": "cats", "5": "cats that sleep", "7": "words <b>in</b> bold"}


def add_dictionary(playground: Playground, name: str = "layer2", labels: Any = LABELS, **cfg: Any) -> None:
    files = {"weights": ("w", dictionary_files.weights()), "cfg": ("c", dictionary_files.cfg(**cfg))}
    fields = {"name": name, "labels": json.dumps(labels)}
    answer = httpx.post(f"{playground.url}/v1/dictionaries", data=fields, files=files)
    assert answer.status_code < 300, answer.text


def tokens_of(page: Page) -> Any:
    return view_of(page).get_by_role("listbox").get_by_role("option")


def top_of(page: Page) -> Any:
    return page.get_by_role("group", name="The token").get_by_role("listitem")


def heats(page: Page) -> list[int]:
    look = "(all) => all.map((one) => Number(one.style.getPropertyValue('--heat')))"
    found: list[int] = tokens_of(page).evaluate_all(look)
    return found


def test_a_dictionary_of_another_model_is_told(playground: Playground, open_page: Open) -> None:
    add_dictionary(playground, "ours")
    add_dictionary(playground, "theirs", model_name="gpt2-small")
    page = open_page(link(playground.url, **VIEW))
    choice, notes = page.get_by_label("Dictionary"), view_of(page).get_by_role("note")
    choice.select_option("theirs")
    expect(notes).to_contain_text("'gpt2-small'")
    choice.select_option("ours")
    expect(notes).to_have_count(0)


def test_features_are_found_colour_the_text_and_get_sliders(playground: Playground, open_page: Open) -> None:
    add_dictionary(playground)
    page = open_page(link(playground.url, **VIEW))
    sent = requests_of(page)
    search = page.get_by_role("region", name="Search")
    expect(search.locator(".name")).to_have_count(0)
    search.get_by_label("Find features").fill("CAT")
    expect(search.get_by_role("status")).to_have_text("2 features")
    expect(search.locator(".name")).to_have_text(["cats (2)", "cats that sleep (5)"])
    search.get_by_label("Find features").fill("9")
    expect(search.locator(".name")).to_have_text(["feature 9"])
    search.get_by_label("Find features").fill("bold")
    expect(search.locator(".name")).to_have_text(["words <b>in</b> bold (7)"])

    press(page)
    (operation,) = sent[-1]["interventions"]
    assert operation == {
        "op": "features",
        "dictionary": "layer2",
        "where": {"exclude": {"positions": [0]}},
        "top_k": 10,
        "name": "top",
    }
    expect(tokens_of(page)).to_have_count(8)
    expect(page.get_by_role("heading", name="Activation of numbers in words (0)")).to_be_visible()
    assert heats(page) == [14, 29, 43, 57, 71, 86, 100, 0], "the strongest feature with a label colours it"
    expect(page.get_by_role("group", name="The token")).to_contain_text("“·four”, position 3")
    tokens_of(page).nth(3).click()
    expect(top_of(page)).to_have_count(10)
    assert top_of(page).locator(".value").all_text_contents()[:3] == ["4.00", "2.00", "1.33"]
    names = top_of(page).locator(".name").all_text_contents()
    assert names[:3] == ["numbers in words (0)", "feature 1", "cats (2)"]
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("group", name="The token")).to_contain_text("“·t0”, position 4")
    page.keyboard.press("End")
    expect(page.get_by_role("group", name="The token")).to_contain_text("The last token is not computed")
    page.keyboard.press("Home")
    expect(page.get_by_role("group", name="The token")).to_contain_text("Position 0 is skipped")

    search.get_by_label("Find features").fill("sleep")
    with page.expect_request("**/v1/completions"):
        search.get_by_role("button", name="cats that sleep").click()
    expect(page.get_by_role("heading", name="Activation of cats that sleep (5)")).to_be_visible()
    view_of(page).get_by_text("Running…").wait_for(state="hidden")
    first, _ = sent[-1]["interventions"]
    assert (first["features"], first["name"]) == ([5], "chosen")
    assert heats(page) == [14, 29, 43, 57, 71, 86, 100, 0], "as a share of the largest"
    expect(tokens_of(page).nth(6)).to_have_attribute("aria-label", "·t2, position 6: 7.00")
    shoot(page, "features-light")

    tokens_of(page).nth(3).click()
    steer = view_of(page).get_by_role("button", name="Steer with it")
    top_of(page).nth(1).get_by_role("button", name="feature 1").click()
    view_of(page).get_by_role("region", name="Feature 1", exact=True).wait_for()
    steer.click()
    expect(view_of(page).get_by_text("is under Steering")).to_be_visible()
    search.get_by_role("button", name="cats that sleep").click()
    view_of(page).get_by_role("region", name="Feature 5", exact=True).wait_for()
    steer.click()
    steer.click()
    expect(view_of(page).get_by_text("already has a slider under Steering")).to_be_visible()
    sliders = page.get_by_role("group", name="Feature:")
    expect(sliders).to_have_count(2)
    assert sliders.nth(0).get_by_label("Activation", exact=True).get_attribute("max") == "14"
    sliders.nth(1).get_by_label("Mode").select_option("ablate")
    expect(sliders.nth(1).get_by_label("Activation", exact=True)).to_have_count(0)
    sliders.nth(0).get_by_label("Activation, as a number").fill("6.5")
    page.get_by_role("navigation", name="Views").get_by_role("button", name="Compare").click()
    press(page)
    changed = next(one for one in reversed(sent) if "interventions" in one)
    changes = [{"feature": 1, "mode": "set", "value": 6.5}, {"feature": 5, "mode": "ablate"}]
    assert changed["interventions"] == [
        {
            "op": "feature",
            "dictionary": "layer2",
            "changes": changes,
            "where": {"exclude": {"positions": [0]}},
        }
    ]
    assert any("interventions" not in one for one in sent), "the plain answer stands beside it"
    for column in ("Baseline", "Steered"):
        expect(page.get_by_role("article", name=column).locator(".text")).to_contain_text("one two")
    shoot(page, "feature-sliders")
    restored = open_page(copied(page, "link"))
    again = requests_of(restored)
    press(restored)
    assert next(one for one in again if "interventions" in one) == changed


def test_sliders_of_other_places_and_conditions_are_other_operations(
    playground: Playground, open_page: Open
) -> None:
    add_dictionary(playground)
    slider = {"dictionary": "layer2", "value": 2.0, "on": True}
    test = {"score": "feature", "dictionary": "layer2", "feature": "cats"}
    given = [
        slider | {"feature": 1},
        slider | {"feature": 2, "where": {"phase": "generated"}},
        slider | {"feature": 3, "change": "scale"},
        slider | {"feature": 4, "on": False},
        slider | {"feature": 5, "when": {"tests": [test, test | {"feature": "#7", "bound": "1.5"}]}},
    ]
    page = open_page(link(playground.url, sliders=given, sampling={"maxTokens": 4}))
    sent = requests_of(page)
    press(page)
    operations = next(one["interventions"] for one in sent if "interventions" in one)
    common = {"op": "feature", "dictionary": "layer2"}
    assert operations == [
        common
        | {
            "changes": [
                {"feature": 1, "mode": "set", "value": 2},
                {"feature": 3, "mode": "scale", "value": 2},
            ]
        },
        common | {"changes": [{"feature": 2, "mode": "set", "value": 2}], "where": {"phase": "generated"}},
        common
        | {
            "changes": [{"feature": 5, "mode": "set", "value": 2}],
            "when": {
                "all": [
                    {"dictionary": "layer2", "feature": "cats", "above": 0},
                    {"dictionary": "layer2", "feature": 7, "above": 1.5},
                ]
            },
        },
    ]
    slider_5 = page.get_by_role("group", name="Feature: feature 5")
    slider_5.locator("details.when summary").click()
    field = slider_5.get_by_role("group", name="Test 1").get_by_label("Feature", exact=True)
    field.fill("sleep")
    options = slider_5.get_by_role("group", name="Test 1").locator("datalist option")
    expect(options).to_have_count(1)
    expect(options).to_have_attribute("value", "5")


def test_without_dictionaries_it_says_how_to_get_one(playground: Playground, open_page: Open) -> None:
    page = open_page(link(playground.url, view="features"))
    expect(view_of(page)).to_contain_text("This server has no dictionaries for this model yet")
    expect(view_of(page)).to_contain_text("POST /v1/dictionaries")
    address = view_of(page).get_by_role("link", name="The API of dictionaries").get_attribute("href")
    assert address == f"{playground.url}/docs#/dictionaries"


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1400, "dark")])
def test_it_fits_and_is_accessible(
    playground: Playground, open_page: Open, axe: str, width: int, scheme: str
) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    add_dictionary(playground, labels=LABELS | {"1": "a long label without any end " * 16})
    sliders = [{"dictionary": "layer2", "feature": 1, "label": "a label"}]
    chosen = {"dictionary": "layer2", "feature": 5, "label": "cats that sleep"}
    page = open_page(
        link(playground.url, **VIEW, **STEERED, sliders=sliders, features=chosen),
        size=(width, 900),
        color_scheme=scheme,
        bypass_csp=True,
    )
    press(page)
    tokens_of(page).nth(2).click()
    assert not is_too_wide(page)
    assert faults(page, axe) == []
    shoot(page, f"features-{width}-{scheme}")
