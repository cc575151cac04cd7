"""The page on a server with a made-up model: keys, errors, cancelling, links, its policy."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from api_schemas.administration import NewKey, Scope
from api_schemas.errors import ApiError, ErrorCode
from app.auth.keys import Keys
from app.routes.pages import STATIC
from app.settings import Settings
from app.storage.database import Database
from app.storage.keys import KeyStore
from tests.fakes.engine import FakeEngineClient
from tests.integration.live import listening
from tests.integration.serving import Application
from tests.playground.conftest import Open, copied, faults, is_too_wide, link, press, shoot, view_of
from tests.waiting import wait_for

pytestmark = pytest.mark.heavy

VECTOR = {"name": "joy", "vectors": {"1": [0.5] * 8, "2": [0.25] * 8}}
STEERED = {"steering": [{"vector": "joy", "layers": "1", "scale": 0.2}]}


@dataclasses.dataclass
class Playground:
    """A server, and what its engine does."""

    url: str
    engine: FakeEngineClient
    settings: Settings

    def key(self, *scopes: Scope) -> str:
        """Make a key; from now on the server asks for one."""

        async def made() -> str:
            database = Database(self.settings.data_dir, self.settings.database_url)
            await database.start()
            created = await Keys(KeyStore(database)).create(NewKey(tenant="acme", scopes=scopes))
            await database.close()
            return created.key

        return str(in_thread(made))


def in_thread(work: Callable[[], Any]) -> Any:
    """Run something asynchronous beside the browser's own loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


Serve = Callable[..., AbstractContextManager[Playground]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @contextmanager
    def serving(**settings: Any) -> Iterator[Playground]:
        served = Application(tmp_path, drain_timeout_s=0, **settings)
        with listening(served.app) as url:
            yield Playground(url, served.engine, served.settings)

    return serving


@pytest.fixture
def playground(serve: Serve) -> Iterator[Playground]:
    with serve() as found:
        yield found


def text_of(page: Page, column: str) -> Any:
    return page.get_by_role("article", name=column).locator(".text")


def test_the_page_may_run_its_own_script_and_ask_its_own_server(playground: Playground) -> None:
    page = httpx.get(f"{playground.url}/playground")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-cache"
    policy = page.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"} <= set(
        policy
    )
    assert not [part for part in policy if "unsafe" in part or "*" in part]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    for asset in (STATIC / "assets").iterdir():
        answer = httpx.get(f"{playground.url}/playground/assets/{asset.name}")
        assert answer.content == asset.read_bytes()
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        again = {"If-None-Match": answer.headers["etag"]}
        assert httpx.get(str(answer.url), headers=again).status_code == 304
    for name in ("nothing.js", "..%2findex.html", "%2e%2e%2fassets.py"):
        assert httpx.get(f"{playground.url}/playground/assets/{name}").status_code == 404


def test_it_can_be_switched_off(serve: Serve) -> None:
    with serve(playground=False) as found:
        for path in ("/playground", "/playground/assets/index.js"):
            assert httpx.get(f"{found.url}{path}").status_code == 404


def test_a_key_is_asked_for_and_kept_nowhere(playground: Playground, open_page: Open) -> None:
    key = playground.key(Scope.COMPLETIONS, Scope.INTERVENTIONS)
    page = open_page(f"{playground.url}/playground", waits=False)
    expect(page.get_by_role("alert")).to_contain_text("This server requires a key")
    field = page.get_by_label("API key")
    expect(field).to_have_attribute("type", "password")
    field.fill("nns_0123456789abcdef_" + "x" * 43)
    page.get_by_role("button", name="Use").click()
    expect(page.get_by_role("alert")).to_contain_text("is unknown")
    field.fill(key)
    field.press("Enter")
    page.get_by_role("navigation", name="Views").wait_for()
    press(page)
    expect(text_of(page, "Baseline")).to_contain_text("dogs are")
    kept = page.evaluate(
        "() => [location.href, document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage),"
        " document.documentElement.outerHTML, document.getElementById('key').value].join()"
    )
    assert key not in kept
    for name in ("curl", "Python", "trace", "link"):
        told = copied(page, name)
        assert key not in told
        assert name == "link" or "NNSIGHT_ENGINE_KEY" in told
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("This server requires a key")


def test_a_key_that_is_none_is_said_so_and_trying_keys_asks_no_more_often(
    playground: Playground, open_page: Open
) -> None:
    key = playground.key(Scope.COMPLETIONS, Scope.INTERVENTIONS)
    page = open_page(f"{playground.url}/playground", waits=False)
    alert = page.get_by_role("alert")
    use = page.get_by_role("button", name="Use")
    page.get_by_label("API key").fill("nns_ключ")
    use.click()
    expect(alert).to_have_text("The API key has a character that keys do not have; copy it again.")
    playground.engine.behaviour.is_starting = True
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(6):
        page.get_by_label("API key").fill(key)
        use.click()
    expect(alert).to_contain_text("still loading")
    first = len(asked)
    page.wait_for_timeout(5_000)
    assert len(asked) - first <= 3, "every two seconds, not for each press"
    playground.engine.behaviour.is_starting = False
    page.get_by_role("navigation", name="Views").wait_for()


def test_a_key_that_may_only_complete_still_completes(playground: Playground, open_page: Open) -> None:
    key = playground.key(Scope.COMPLETIONS)
    page = open_page(f"{playground.url}/playground", waits=False)
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use").click()
    expect(page.locator(".given").get_by_role("alert")).to_contain_text("interventions")
    press(page)
    expect(text_of(page, "Baseline")).to_contain_text("dogs are")
    page.get_by_role("button", name="Logit lens").click()
    press(page)
    expect(view_of(page).get_by_role("alert")).to_contain_text("interventions")


def test_cancelling_ends_it_in_the_engine_too(playground: Playground, open_page: Open) -> None:
    playground.engine.behaviour.delay_s = 0.2
    page = open_page(f"{playground.url}/playground")
    cancel = view_of(page).get_by_role("button", name="Cancel")
    expect(cancel).to_be_disabled()
    view_of(page).get_by_role("button", name="Run", exact=True).click()
    expect(text_of(page, "Baseline")).to_contain_text("I think")
    cancel.click()
    wait_for(lambda: playground.engine.num_running == 0)
    expect(cancel).to_be_disabled()
    text = text_of(page, "Baseline").inner_text()
    assert 0 < len(text.split()) < 32
    expect(page.get_by_role("alert")).to_have_count(0)
    view_of(page).get_by_role("button", name="Run", exact=True).click()
    wait_for(lambda: playground.engine.num_running == 1)
    page.keyboard.press("Escape")
    wait_for(lambda: playground.engine.num_running == 0)


def test_when_one_of_two_texts_fails_the_other_ends(playground: Playground, open_page: Open) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    playground.engine.behaviour.delay_s = 0.5
    page = open_page(link(playground.url, sampling={"maxTokens": 200}, **STEERED))

    def refuse(route: Route) -> None:
        if "interventions" not in (route.request.post_data or ""):
            return route.continue_()
        wait_for(lambda: playground.engine.num_running == 1)
        return route.abort()

    page.route("**/v1/completions", refuse)
    press(page)
    expect(view_of(page).get_by_role("alert")).to_contain_text("cannot be reached")
    wait_for(lambda: playground.engine.num_running == 0)
    assert len((text_of(page, "Baseline").text_content() or "").split()) < 150


def test_what_is_drawn_is_named_as_it_was_asked_for(playground: Playground, open_page: Open) -> None:
    page = open_page(link(playground.url, view="lens", prompt="one two three"))
    press(page)
    page.get_by_label("Every nth layer").fill("3")
    rows = page.get_by_role("grid").locator("tbody th")
    expect(rows).to_have_text(["3", "2", "1", "0"])
    with page.expect_request("**/v1/completions") as asked:
        page.get_by_role("grid").locator("tbody td").first.click()
    (operation,) = json.loads(asked.value.post_data or "")["interventions"]
    assert operation["layers"] == [0, 1, 2, 3]
    assert operation["where"] == {"positions": [0]}
    expect(page.get_by_role("img", name="Rank of").locator("circle")).to_have_count(4)
    page.keyboard.press("End")
    press(page)
    expect(rows).to_have_text(["3", "0"])
    expect(page.locator(".details h3")).to_contain_text("Layer 3, after")

    page.goto(link(playground.url, view="activations", prompt="one two", activations={"layer": 1}))
    press(page)
    playground.engine.behaviour.delay_s = 60.0
    page.get_by_label("Layer, as a number").fill("3")
    wait_for(lambda: playground.engine.num_running == 1)
    expect(page.get_by_role("heading", name="Norm after layer")).to_have_text("Norm after layer 1")
    page.keyboard.press("Escape")
    view_of(page).get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("heading", name="Norm after layer")).to_have_count(0)
    page.keyboard.press("Escape")


def test_a_position_without_a_number_moves_no_other(playground: Playground, open_page: Open) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    chosen = {"layer": 1, "vector": "joy"}
    page = open_page(
        link(
            playground.url,
            view="activations",
            prompt="one two three four",
            sampling={"maxTokens": 1},
            activations=chosen,
        )
    )

    def leave_out(route: Route) -> None:
        answer = route.fetch()
        events = []
        for event in answer.text().split("\n\n"):
            if '"probe"' not in event:
                events.append(event)
                continue
            content = json.loads(event.removeprefix("data: "))
            probe = content["choices"][0]["interventions"]["results"]["probe"]
            (values,) = probe["points"].values()
            if 1 in probe["positions"]:
                values[probe["positions"].index(1)] = None
            events.append(f"data: {json.dumps(content)}")
        route.fulfill(response=answer, body="\n\n".join(events))

    page.route("**/v1/completions", leave_out)
    press(page)
    probed = page.get_by_role("region", name="Probe along joy")
    assert probed.locator("tr").all_text_contents() == ["·one0.00", "·three0.20", "·four0.30"]
    probed.locator(".heated span").nth(1).hover()
    expect(probed.locator(".status")).to_have_text("·three, position 2: 0.20")
    norms = page.get_by_role("region", name="Norm after layer 1")
    expect(norms.locator(".status")).to_contain_text("·three, position 2:")


def test_a_link_that_is_opened_is_not_overwritten(playground: Playground, open_page: Open) -> None:
    page = open_page(link(playground.url))
    opened = link(playground.url, view="lens").partition("#")[2]
    page.evaluate(
        """(opened) => {
            document.querySelector("[aria-label=Views] button:last-child").click();
            history.replaceState(null, "", `#${opened}`);  // of which the page is not told yet
        }""",
        opened,
    )
    page.wait_for_timeout(600)  # in which the address follows the page
    assert page.evaluate("() => location.hash") == f"#{opened}"


def test_a_name_means_in_a_trace_what_it_means_to_the_server(playground: Playground, open_page: Open) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    (vector,) = httpx.get(f"{playground.url}/v1/vectors").json()["data"]
    seen = [
        vector | {"id": "vec_shared", "version": 7, "own": False, "shared": True},
        vector | {"id": "vec_elsewhere", "version": 3, "model": "another"},
        vector | {"id": "vec_own", "version": 2},
        vector | {"id": "vec_dot", "name": "sad.ness"},
        vector | {"id": "vec_dash", "name": "sad-ness"},
    ]
    page = open_page(f"{playground.url}/playground")
    page.route("**/v1/vectors?*", lambda route: route.fulfill(json={"data": seen, "has_more": False}))
    steering = [{"vector": name, "layers": "1"} for name in ("joy", "joy@3", "sad-ness")]
    chosen = {"layer": 1, "vector": "sad.ness", "steered": True}
    page.goto(link(playground.url, view="activations", steering=steering, activations=chosen))
    page.reload()
    page.get_by_role("group", name="Vector 3").wait_for()
    text = copied(page, "trace")
    loaded = dict(re.findall(r"^(\w+) = load\(.*/v1/vectors/(\w+)/content", text, re.MULTILINE))
    assert loaded == {
        "joy_2": "vec_own",
        "joy_3": "vec_elsewhere",
        "sad_ness_1": "vec_dot",
        "sad_ness_1_no2": "vec_dash",
    }
    assert 'v = joy_2[f"layers.{layer}.output"]' in text
    assert 'value @ sad_ness_1["layers.1.output"]' in text


def test_a_patching_map_has_no_more_cells_than_a_request(playground: Playground, open_page: Open) -> None:
    page = open_page(link(playground.url, view="patching"))

    def tokens(route: Route) -> None:
        start = 100 if "Eiffel" in (route.request.post_data or "") else 200
        route.fulfill(json={"tokens": [{"id": start + place % 50, "text": "x"} for place in range(512)]})

    sizes: list[int] = []

    def hold(route: Route) -> None:
        prompt = json.loads(route.request.post_data or "")["prompt"]
        if isinstance(prompt[0], int):
            return route.continue_()
        sizes.append(len(prompt))
        return route.abort()

    page.route("**/v1/tokenize", tokens)
    page.route("**/v1/completions", hold)
    press(page)
    assert sizes == [513], "of four layers one: two would be 1025 prompts"


def test_tokens_are_taken_as_they_are_shown(playground: Playground, open_page: Open) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    told = [" one", "\n", "a\t b", "·", "\x1b", "\\u00b7", "<0xE2>", "\r\n", "\\·", "∅"]
    prompt = "a b c d e f g h i j"
    page = open_page(link(playground.url, view="activations", prompt=prompt, **STEERED))

    def tell(route: Route) -> None:
        route.fulfill(json={"tokens": [{"id": at, "text": text} for at, text in enumerate(told)]})

    page.route("**/v1/tokenize", tell)
    press(page)
    rows = view_of(page).locator("tbody tr")
    expect(rows.nth(len(told) - 1)).to_be_attached()
    shown = view_of(page).locator("tbody th").all_text_contents()[: len(told)]
    assert shown[:2] == ["·one", "⏎"]
    assert len(set(shown)) == len(told)
    sent: list[Any] = []

    def hold(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or ""))
        route.abort()

    where = {"tokens": ",".join([*shown, "#7042", " two"])}
    page = open_page(link(playground.url, steering=[STEERED["steering"][0] | {"where": where}]))
    page.route("**/v1/completions", hold)
    press(page)
    wait_for(lambda: len(sent) == 2)
    (steering,) = next(one["interventions"] for one in sent if "interventions" in one)
    assert steering["where"]["tokens"] == [*told, 7042, " two"]


def test_the_steering_is_kept_as_a_preset_and_a_preset_steers(
    playground: Playground, open_page: Open
) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    page = open_page(link(playground.url, sampling={"maxTokens": 4}, **STEERED))
    page.get_by_text("Save this steering as a preset").click()
    page.get_by_label("Preset name").fill("Calm")
    page.get_by_role("button", name="Save as preset").click()
    expect(page.locator(".given").get_by_role("alert")).to_contain_text("name")
    page.get_by_label("Preset name").fill("calm")
    page.get_by_role("button", name="Save as preset").click()
    page.get_by_text("calm, version 1, is saved.").wait_for()
    kept = httpx.get(f"{playground.url}/v1/presets/calm").json()["interventions"]
    assert [(one["op"], one["at"], one["scale"]) for one in kept] == [("steer", "layers.1.output", 0.2)]
    page.get_by_role("button", name="Remove vector 1").click()
    page.get_by_label("Preset, applied before").select_option("calm")
    with page.expect_request(lambda request: "preset" in str(request.post_data)) as sent:
        press(page)
    body: dict[str, Any] = json.loads(str(sent.value.post_data))
    assert (body["preset"], "interventions" in body) == ("calm", False)
    expect(text_of(page, "Steered")).to_contain_text("dogs")
    program = copied(page, "Python")
    assert 'extra_body={"preset": "calm"}' in program
    restored = open_page(copied(page, "link"))
    expect(restored.get_by_label("Preset, applied before")).to_have_value("calm")


def test_the_keyboard_runs_a_view_and_tokens_are_counted(playground: Playground, open_page: Open) -> None:
    playground.engine.behaviour.delay_s = 0.3
    page = open_page(f"{playground.url}/playground")
    expect(page.get_by_label("API key")).to_have_count(0)
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    expect(view_of(page).get_by_text(re.compile(r"^[2-9] tokens$"))).to_be_visible()
    page.keyboard.press("Escape")
    shown = text_of(page, "Baseline").text_content()
    page.get_by_role("button", name="Attention").click()
    page.get_by_role("button", name="Compare").click()
    expect(text_of(page, "Baseline")).to_have_text(str(shown))


def test_on_a_phone_run_and_the_answer_are_in_reach(playground: Playground, open_page: Open) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    page = open_page(link(playground.url, **STEERED), size=(390, 844))
    run = view_of(page).get_by_role("button", name="Run", exact=True)
    for place in (page.get_by_label("Prompt", exact=True), page.get_by_label("Strength", exact=True)):
        place.scroll_into_view_if_needed()
        expect(run).to_be_in_viewport(ratio=1)
        press(page)
        expect(text_of(page, "Baseline")).to_be_in_viewport()


def test_moving_the_strength_runs_again_and_cancels_what_ran(playground: Playground, open_page: Open) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    page = open_page(link(playground.url, sampling={"maxTokens": 4}, **STEERED))
    press(page)
    expect(text_of(page, "Steered")).to_contain_text("dogs")
    playground.engine.behaviour.delay_s = 60.0  # longer than anything here is waited for
    before = playground.engine.num_calls
    slider = page.get_by_role("slider", name="Strength")
    slider.evaluate(
        """(slider) => {
            for (const value of [0.3, 0.4, 0.5, 0.6]) {
                slider.value = String(value);
                slider.dispatchEvent(new Event("input", {bubbles: true}));
            }
        }"""
    )
    wait_for(lambda: playground.engine.num_running == 1)
    moved = playground.engine.num_calls
    assert moved == before + 1, (
        "moves are waited for, and the baseline, which is known, is not asked for again"
    )
    slider.press("ArrowLeft")
    wait_for(lambda: playground.engine.num_calls == moved + 1)
    wait_for(lambda: playground.engine.num_running == 1)
    page.keyboard.press("Escape")
    wait_for(lambda: playground.engine.num_running == 0)


def test_errors_are_sentences(playground: Playground, open_page: Open) -> None:
    page = open_page(f"{playground.url}/playground")
    behaviour = playground.engine.behaviour
    behaviour.error = ApiError(ErrorCode.QUEUE_FULL, "The queue is full: send it again later.")
    press(page)
    alert = view_of(page).get_by_role("alert")
    expect(alert).to_have_text("The queue is full: send it again later.")
    behaviour.error = None
    behaviour.stream_error = ApiError(ErrorCode.ENGINE_DEAD, "The engine stopped")
    press(page)
    expect(alert).to_have_text("The engine stopped.")
    expect(text_of(page, "Baseline")).to_contain_text("I")
    behaviour.stream_error = None
    press(page)
    expect(alert).to_have_count(0)
    page.route("**/v1/completions", lambda route: route.abort())
    page.get_by_label("Prompt", exact=True).fill("Something else")
    press(page)
    expect(alert).to_have_text("The server cannot be reached. Is it still running?")
    expect(text_of(page, "Baseline")).to_have_text("The model's own text.")
    page.unroute("**/v1/completions")
    view_of(page).get_by_role("button", name="Retry").click()
    expect(text_of(page, "Baseline")).to_contain_text("Something")
    expect(alert).to_have_count(0)


def test_fields_that_cannot_be_sent_say_what_they_take(playground: Playground, open_page: Open) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    page = open_page(link(playground.url, **STEERED))
    page.locator("details.where summary").click()
    alert = view_of(page).get_by_role("alert")
    wrong = [
        ("Layers", "middle", "8:20"),
        ("Range", "3-9", "start:stop"),
        ("Positions", "x", "whole numbers"),
    ]
    for label, value, said in wrong:
        field = page.get_by_label(label, exact=True)
        before = field.input_value()
        field.fill(value)
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field.locator("xpath=following-sibling::small")).to_contain_text(said)
        press(page)
        expect(alert).to_contain_text(said)
        field.fill(before)
        expect(field).not_to_have_attribute("aria-invalid", "true")
    most = page.get_by_label("Max tokens")
    most.fill("0")
    expect(most).to_have_attribute("aria-invalid", "true")


def test_what_a_model_writes_is_never_html(playground: Playground, open_page: Open) -> None:
    prompt = "<img src=x onerror=window.hit=1> <script>window.hit=1</script> <b>bold</b>"
    page = open_page(link(playground.url, prompt=prompt))
    press(page)
    expect(text_of(page, "Baseline")).to_contain_text("<b>bold</b>")
    page.get_by_role("button", name="Logit lens").click()
    press(page)
    expect(page.get_by_role("grid")).to_contain_text("onerror")
    assert page.evaluate("() => [window.hit ?? 0, document.querySelectorAll('img, b').length]") == [0, 0]


def test_a_figure_is_saved_as_what_it_shows(playground: Playground, open_page: Open) -> None:
    page = open_page(link(playground.url, view="lens", prompt="one two <three>", sampling={"maxTokens": 2}))
    press(page)
    page.get_by_role("grid").locator("tbody td").first.click()
    page.get_by_role("img", name="Rank of").wait_for()
    for figure in ("Logit lens", "Rank of"):
        saved = {}
        for kind in ("PNG", "SVG", "CSV"):
            group = page.get_by_role("group", name=f"Save: {figure}")
            with page.expect_download() as download:
                group.get_by_role("button", name=kind).click()
            assert download.value.suggested_filename.endswith(f".{kind.lower()}")
            saved[kind] = download.value.path().read_bytes()
        assert saved["PNG"].startswith(b"\x89PNG")
        drawing = ElementTree.fromstring(saved["SVG"])
        texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
        rows = list(csv.reader(saved["CSV"].decode().splitlines()))
        if figure == "Logit lens":
            assert "·<three>" in texts
            assert rows[0] == ["layer", "token", "text", "value"]
            assert len(rows) == 1 + 4 * 4
            assert {row[1] for row in rows[1:]} >= {"·one", "·<three>"}
        else:
            assert "layer" in texts
            assert [row[0] for row in rows] == ["layer", "0", "1", "2", "3"]


def test_a_link_restores_the_page_and_a_broken_one_does_no_harm(
    playground: Playground, open_page: Open
) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    page = open_page(f"{playground.url}/playground")
    page.get_by_role("button", name="Chat").click()
    page.get_by_label("Message 1", exact=True).fill("Grüß Gott, 世界 🙂")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_role("button", name="Add a vector").click()
    page.get_by_label("Mode").select_option("project_out")
    page.get_by_role("button", name="Activations").click()
    address = copied(page, "link")
    expect(page).to_have_url(address)

    other = open_page(address)
    expect(other.get_by_label("Message 1", exact=True)).to_have_value("Grüß Gott, 世界 🙂")
    expect(other.get_by_label("Temperature")).to_have_value("0.7")
    expect(other.get_by_label("Mode")).to_have_value("project_out")
    expect(other.get_by_role("button", name="Activations")).to_have_attribute("aria-current", "page")
    for broken in ("#s=!!!", "#s=bnVsbA", "#s=eyJ2aWV3Ijo3LCJzdGVlcmluZyI6WzEsbnVsbF19", "#nothing"):
        strange = open_page(f"{playground.url}/playground{broken}")
        expect(strange.get_by_label("Prompt", exact=True)).to_have_value("I think dogs are")
        press(strange)


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (768, "light"), (1600, "dark")])
def test_every_view_fits_and_is_accessible(
    playground: Playground, open_page: Open, axe: str, width: int, scheme: str
) -> None:
    httpx.post(f"{playground.url}/v1/vectors", json=VECTOR).raise_for_status()
    page = open_page(link(playground.url, **STEERED), size=(width, 900), color_scheme=scheme, bypass_csp=True)
    for view in ("Compare", "Strengths", "Logit lens", "Activations", "Features", "Attention", "Patching"):
        page.get_by_role("navigation", name="Views").get_by_role("button", name=view).click()
        expect(view_of(page).get_by_role("heading", name=view)).to_be_visible()
        if view == "Compare":
            press(page)
        assert not is_too_wide(page), view
        assert faults(page, axe) == [], view
    shoot(page, f"page-{width}-{scheme}")


def test_the_keyboard_reaches_everything(playground: Playground, open_page: Open) -> None:
    page = open_page(f"{playground.url}/playground")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        name = "() => document.activeElement.textContent || document.activeElement.id"
        reached.add(page.evaluate(name))
    assert {"Compare", "Patching", "Plain text", "Chat", "Run", "curl", "trace", "link"} <= reached
