"""Detectors' scores, flags, stops and conditions on the page, on a server with a made-up model."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from api_schemas.administration import Scope
from tests.playground.conftest import Open, copied, faults, is_too_wide, link, press, shoot, view_of
from tests.playground.test_page import STEERED, VECTOR, Playground, playground, serve

pytestmark = pytest.mark.heavy

__all__ = ["playground", "serve"]  # fixtures

SHORT = {"sampling": {"maxTokens": 4}}
PROMPT = "one two three four"
PART = {"at": "layers.1.output", "form": "linear", "weights": [0.5] * 8}


def add_detector(playground: Playground, name: str = "question", threshold: float | None = 0.25) -> None:
    body = {"name": name, "parts": [PART], "threshold": threshold}
    httpx.post(f"{playground.url}/v1/detectors", json=body).raise_for_status()


def add_vector(playground: Playground) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()


def requests_of(page: Page) -> list[dict[str, Any]]:
    """Return the bodies of completions that the page asks for from now on; the list grows."""
    found: list[dict[str, Any]] = []

    def note(request: Any) -> None:
        if request.url.endswith("/completions"):
            found.append(json.loads(request.post_data))

    page.on("request", note)
    return found


def tokens_of(page: Page, column: str) -> Any:
    return page.get_by_role("listbox", name=f"{column}: scores of tokens").get_by_role("option")


def test_scores_stand_below_the_tokens_as_they_come(playground: Playground, open_page: Open) -> None:
    add_vector(playground)
    add_detector(playground)
    playground.engine.behaviour.delay_s = 0.3
    page = open_page(link(playground.url, prompt=PROMPT, **SHORT, **STEERED))
    page.get_by_label("Scores of question").check()
    view_of(page).get_by_role("button", name="Run", exact=True).click()
    for column in ("Baseline", "Steered"):
        expect(tokens_of(page, column).first).to_contain_text("0.00")
    assert tokens_of(page, "Steered").count() < 8, "the text is not complete yet"
    view_of(page).get_by_text("Running…").wait_for(state="hidden")
    for column in ("Baseline", "Steered"):
        tokens = tokens_of(page, column)
        expect(tokens).to_have_count(8)  # of the prompt four, of the answer four
        assert tokens.locator(".number").all_text_contents() == [
            "0.00", "0.10", "0.20", "0.30", "0.40", "0.50", "0.60", "–",
        ]  # fmt: skip
        over = [index for index in range(8) if tokens.nth(index).locator(".over").count()]
        assert over == [3, 4, 5, 6], "above the detector's threshold"
    region = page.get_by_role("region", name="Steered, token by token")
    expect(region).to_contain_text("question, threshold 0.25")
    tokens_of(page, "Steered").nth(3).hover()
    expect(region.locator(".status")).to_have_text("·four, position 3: question 0.30")
    tokens_of(page, "Steered").nth(3).click()
    page.keyboard.press("ArrowRight")
    expect(region.locator(".status")).to_contain_text("position 4: question 0.40")
    page.keyboard.press("End")
    expect(region.locator(".status")).to_contain_text("position 7: no score of question")
    shoot(page, "scores")


def test_what_is_built_is_what_is_sent(playground: Playground, open_page: Open) -> None:
    add_vector(playground)
    add_detector(playground)
    add_detector(playground, "refusal", threshold=None)
    page = open_page(link(playground.url, prompt=PROMPT, **SHORT, **STEERED))
    sent = requests_of(page)
    vector = page.get_by_role("group", name="Vector 1")
    vector.get_by_text("When: always").click()
    vector.get_by_role("button", name="Add a test").click()
    vector.get_by_label("Detector").select_option("question")
    expect(vector.get_by_label("Threshold")).to_have_attribute("placeholder", "0.25")
    vector.get_by_label("Over", exact=True).select_option("window")
    vector.get_by_label("Window").fill("3")
    vector.get_by_label("Reduce").select_option("mean")
    vector.get_by_label("Hysteresis").fill("0.1")
    vector.get_by_role("button", name="Add another test").click()
    second = vector.get_by_role("group", name="Test 2")
    second.get_by_label("Detector").select_option("refusal")
    second.get_by_label("Side").select_option("below")
    second.get_by_label("Negated").check()
    press(page)
    expect(view_of(page).get_by_role("alert")).to_contain_text("refusal has no threshold")
    second.get_by_label("Threshold").fill("much")
    press(page)
    expect(view_of(page).get_by_role("alert")).to_contain_text("A threshold is a number")
    second.get_by_label("Threshold").fill("-2")
    second.get_by_label("Until", exact=True).select_option("end")
    vector.get_by_label("Join").select_option("any")
    expect(vector.locator("summary").last).to_contain_text(
        "question (mean of the last 3) > 0.25 or not refusal < -2"
    )
    press(page)
    (steering,) = next(one["interventions"] for one in reversed(sent) if "interventions" in one)
    assert steering["when"] == {
        "any": [
            {"detector": "question", "over": "window", "of": 3, "reduce": "mean", "hysteresis": 0.1},
            {"not": {"detector": "refusal", "below": -2, "until": "end"}},
        ]
    }
    held = ["steering by joy holds" in text for text in tokens_of(page, "Steered").all_text_contents()]
    assert held == [False, False, True, False, False, True, False, False], (
        "where the server says that it acted"
    )
    expect(page.get_by_text("Steered 2 positions at layers.1.output.")).to_be_visible()
    restored = open_page(copied(page, "link"))
    again = requests_of(restored)
    press(restored)
    (steering_again,) = next(one["interventions"] for one in again if "interventions" in one)
    assert steering_again == steering
    bar = page.get_by_role("group", name="Copy this view")
    bar.get_by_role("button", name="trace").click()
    expect(bar).to_contain_text("cannot use features, detectors or conditions")


def test_flags_and_stops_are_built_and_shown(playground: Playground, open_page: Open) -> None:
    add_detector(playground)
    page = open_page(link(playground.url, prompt=PROMPT, **SHORT))
    sent = requests_of(page)
    page.get_by_role("button", name="Add a flag").click()
    press(page)
    expect(view_of(page).get_by_role("alert")).to_contain_text("“flag 1” needs a condition")
    flag = page.get_by_role("group", name="Flag: flag 1")
    flag.get_by_role("button", name="Add a test").click()
    flag.get_by_label("Side").select_option("below")
    press(page)
    held = page.get_by_role("listbox").locator(".held")
    expect(held).to_have_text(["·three flag 1 holds", "·t1 flag 1 holds"])
    assert [one.get_attribute("data-position") for one in held.all()] == ["2", "5"]
    assert page.get_by_role("listbox").count() == 1, "nothing changes the text: there is no second one"
    page.get_by_role("button", name="Add a stop").click()
    stop = page.get_by_role("group", name="Stop: stop 2")
    stop.get_by_label("Name").fill("enough")
    stop = page.get_by_role("group", name="Stop: enough")
    stop.get_by_role("button", name="Add a test").click()
    stop.locator("details.where summary").click()
    stop.get_by_label("Phase").select_option("generated")

    def end(route: Route) -> None:
        answer = route.fetch()
        text = answer.text()
        if '"stop"' in (route.request.post_data or ""):
            ended = '"finish_reason": "stop", "stop_reason": {"intervention": "enough"}'
            text, num_ended = re.subn(r'"finish_reason": ?"length"', ended, text)
            assert num_ended
        route.fulfill(response=answer, body=text)

    page.route("**/v1/completions", end)
    sent.clear()
    press(page)
    expect(page.get_by_role("article", name="Steered")).to_contain_text("Ended by “enough”.")
    expect(page.get_by_role("article", name="Baseline")).not_to_contain_text("Ended by")
    changed = next(one for one in reversed(sent) if any(op["op"] == "stop" for op in one["interventions"]))
    assert changed["interventions"] == [
        {
            "op": "stop",
            "name": "enough",
            "when": {"detector": "question"},
            "where": {"phase": "generated"},
        },
        {"op": "flag", "name": "flag 1", "when": {"detector": "question", "below": 0.25}},
    ]


def test_without_detectors_it_says_how_to_get_one(playground: Playground, open_page: Open) -> None:
    page = open_page(link(playground.url))
    panel = page.get_by_role("region", name="Detectors and conditions")
    expect(panel).to_contain_text("This server has no detectors yet. POST /v1/detectors/train")
    expect(panel.get_by_role("button")).to_have_count(0)
    guide = panel.get_by_role("link", name="The API of detectors")
    address = guide.get_attribute("href")
    assert address == f"{playground.url}/docs#/detectors"
    assert httpx.get(address).status_code == 200


def test_a_first_visit_steers_with_a_shared_vector(playground: Playground, open_page: Open) -> None:
    key = playground.key(Scope.COMPLETIONS, Scope.INTERVENTIONS, Scope.ADMIN)

    def visit() -> Page:
        page = open_page(f"{playground.url}/playground", waits=False)
        page.get_by_label("API key").fill(key)
        page.get_by_label("API key").press("Enter")
        page.get_by_role("navigation", name="Views").wait_for()
        return page

    for name, chosen in (
        ("own", ""),
        ("calm", "calm"),
        ("example-joy", "example-joy"),
        ("zeal", "example-joy"),
    ):
        body = VECTOR | {"name": name, "shared": name != "own"}
        answer = httpx.post(
            f"{playground.url}/v1/vectors", json=body, headers={"Authorization": f"Bearer {key}"}
        )
        answer.raise_for_status()
        page = visit()
        if not chosen:
            expect(page.get_by_role("button", name="Add a vector")).to_be_visible()
            continue
        expect(page.get_by_role("group", name=f"Vector 1: {chosen}")).to_be_visible()
        sent = requests_of(page)
        press(page)
        expect(page.get_by_role("article", name="Steered").locator(".text")).to_contain_text("dogs")
        (steering,) = next(one["interventions"] for one in sent if "interventions" in one)
        assert steering["vector"] == {"name": chosen}
    page.get_by_role("button", name="Remove vector 1").click()
    expect(page).to_have_url(re.compile("#s=e30$"))
    page.reload()
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").press("Enter")
    expect(page.get_by_role("button", name="Add a vector")).to_be_visible()


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1400, "light")])
def test_it_fits_and_is_accessible(
    playground: Playground, open_page: Open, axe: str, width: int, scheme: str
) -> None:
    add_vector(playground)
    add_detector(playground)
    test = {"score": "detector", "detector": "question", "over": "window", "until": "clears"}
    when = {"join": "any", "tests": [test, test | {"isNegated": True}]}
    steering = [STEERED["steering"][0] | {"when": when}]
    given = {"steering": steering, "marks": [{"op": "flag", "when": when}], "watched": ["question"]}
    page = open_page(
        link(playground.url, prompt=PROMPT, **SHORT, **given),
        size=(width, 900),
        color_scheme=scheme,
        bypass_csp=True,
    )
    page.locator("details.when summary").first.click()
    press(page)
    assert not is_too_wide(page)
    assert faults(page, axe) == []
    shoot(page, f"conditions-{width}-{scheme}")
