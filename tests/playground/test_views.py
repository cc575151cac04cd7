"""Each view on the real model: it shows the API's results, and copied requests give the same results."""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
import safetensors.numpy
from playwright.sync_api import Page, Route, expect

from tests.e2e.server import PROJECT, Server
from tests.playground.conftest import RUN_MS, Open, copied, faults, is_too_wide, link, press, shoot, view_of

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

PROMPT = "The Eiffel Tower is in the city of"
MODEL = "smollm2-135m-instruct"
SHORT = {"maxTokens": 6}
JOY = {"vector": "joy", "layers": "12", "mode": "norm_match", "scale": 0.3}
GLAD = [
    "I love this, it is wonderful.",
    "What a beautiful day!",
    "She smiled, full of hope.",
    "Great work, well done.",
]
SAD = [
    "I hate this, it is horrible.",
    "What an awful day!",
    "She cried, full of fear.",
    "Terrible work, badly done.",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Serve the bundled model over HTTP, with a vector; so exact that company in a step changes no token.

    What patching captures comes inside the answer for one pair of prompts here, and as a file for the other.
    """
    limit = {"NNSIGHT_ENGINE_INLINE_TENSOR_BYTES": "300000"}
    arguments = ["--max-model-len", "1024", "--dtype", "float32"]
    with Server(arguments=arguments, environment=limit) as server:
        body = {"name": "joy", "position": "mean", "positive": GLAD, "negative": SAD}
        httpx.post(f"{server.base_url}/v1/vectors/train", json=body, timeout=60).raise_for_status()
        yield server


def asked(server: Server, path: str = "/v1/completions", **body: Any) -> Any:
    answer = httpx.post(f"{server.base_url}{path}", json={"temperature": 0, "seed": 0, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def steer(scale: float = 0.3) -> dict[str, Any]:
    return {
        "op": "steer",
        "at": "layers.12.output",
        "vector": {"name": "joy"},
        "mode": "norm_match",
        "scale": scale,
    }


def visible(token: str) -> str:
    return token.replace("\n", "⏎").replace(" ", "·")


def column(page: Page, name: str) -> Any:
    return page.get_by_role("article", name=name).locator(".text")


def tokens(server: Server, prompt: str = PROMPT) -> list[str]:
    answer = httpx.post(f"{server.base_url}/v1/tokenize", json={"prompt": prompt})
    return [token["text"] for token in answer.json()["tokens"]]


def run_programs(folder: Path, *programs: str) -> list[str]:
    """Run Python programs one after another in one process; return what each printed."""
    paths = []
    for index, program in enumerate(programs):
        path = folder / f"program_{index}.py"
        path.write_text(program)
        paths.append(str(path))
    script = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path)\n    print('----')\n"
    told = subprocess.run(
        [sys.executable, "-c", script, *paths],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PROJECT)},
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout.split("----\n")[:-1]


def test_a_vector_is_made_and_steers_beside_the_baseline(server: Server, open_page: Open) -> None:
    page = open_page(link(server.base_url, sampling={"maxTokens": 24}))
    page.get_by_text("Train a vector from two lists of prompts").click()
    page.get_by_label("Name", exact=True).fill("gladness")
    page.get_by_role("button", name="Train").click()
    expect(page.get_by_text("gladness, version 1, is saved")).to_be_visible()
    expect(page.get_by_role("group", name="Vector 1: gladness")).to_be_visible()
    shoot(page, "training")

    page.goto(link(server.base_url, sampling={"maxTokens": 24}, steering=[JOY]))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.post_data or ""))
    press(page)
    prompt = "I think dogs are"
    plain = asked(server, prompt=prompt, max_tokens=24)["choices"][0]["text"]
    changed = asked(server, prompt=prompt, max_tokens=24, interventions=[steer()])["choices"][0]["text"]
    assert plain != changed
    assert column(page, "Baseline").text_content() == plain
    assert column(page, "Steered").text_content() == changed
    for name in ("Baseline", "Steered"):
        marked = [mark.text_content() for mark in column(page, name).locator("mark").all()]
        assert marked
    hint = view_of(page).get_by_text("The texts diverge at word")
    expect(hint).to_contain_text("positions at layers.12.output")
    shoot(page, "compare-light")

    del requests[:]
    page.get_by_label("Strength, as a number").fill("-0.3")
    changed = asked(server, prompt=prompt, max_tokens=24, interventions=[steer(-0.3)])["choices"][0]["text"]
    expect(column(page, "Steered")).to_have_text(changed)
    assert len([body for body in requests if "steer" in body]) == len(requests) == 1


def test_a_first_visit_ends_with_a_joyful_text(server: Server, open_page: Open) -> None:
    joy = steer(1.0) | {"vector": {"name": "example-joy"}, "mode": "add"}
    body: dict[str, Any] = {"prompt": "I think dogs are", "max_tokens": 16}
    plain = asked(server, **body)["choices"][0]["text"]
    changed = asked(server, **body, interventions=[joy])["choices"][0]["text"]
    assert "endearing" in changed
    assert "endearing" not in plain
    page = open_page(f"{server.base_url}/playground")
    expect(column(page, "Steered")).to_have_text(changed, timeout=RUN_MS)
    expect(column(page, "Baseline")).to_have_text(plain)
    apart = f"The texts diverge at word {word_apart(plain, changed)};"
    expect(view_of(page).get_by_text(apart)).to_be_visible()
    marks = [column(page, name).locator(".divergence") for name in ("Baseline", "Steered")]
    for mark in marks:
        expect(mark).to_have_count(1)
    shoot(page, "first-visit")


def word_apart(one: str, other: str) -> int:
    """Return the number of the first word that differs."""
    pairs = zip(one.split(), other.split(), strict=False)
    return next(number for number, (word, another) in enumerate(pairs, 1) if word != another)


def test_a_conversation_streams_and_a_where_clause_narrows(server: Server, open_page: Open) -> None:
    messages = [{"role": "user", "content": "Say something about Mondays."}]
    where = {"phase": "generated", "exceptPositions": "0"}
    state = {"kind": "chat", "messages": messages, "sampling": {"maxTokens": 16}}
    page = open_page(link(server.base_url, **state, steering=[JOY | {"where": where}]), color_scheme="dark")
    press(page)
    narrowed = steer() | {"where": {"phase": "generated", "exclude": {"positions": [0]}}}
    answer = asked(server, "/v1/chat/completions", messages=messages, max_tokens=16, interventions=[narrowed])
    expect(column(page, "Steered")).to_have_text(answer["choices"][0]["message"]["content"])
    shoot(page, "compare-chat-dark")


def test_strengths_stand_beside_each_other(server: Server, open_page: Open) -> None:
    state = {"view": "sweep", "sampling": {"maxTokens": 12}, "sweep": {"from": -0.3, "to": 0.3, "steps": 3}}
    page = open_page(link(server.base_url, **state, steering=[JOY]))
    requests: list[str] = []
    bodies: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    press(page)
    assert len([url for url in requests if url.endswith("/completions")]) == 1
    cards = page.locator(".multiple .text").all_text_contents()
    assert len(cards) == 4
    baseline, less, same, more = cards
    assert same == baseline, "a strength of nothing changes nothing"
    assert len({baseline, less, more}) == 3
    shoot(page, "strengths-light")
    direction = vector_row(server, "joy", 12)
    for measure in ("target", "projection", "perplexity"):
        page.get_by_label("Plot").select_option(measure)
        chart = page.get_by_role("img", name=re.compile("by strength"))
        expect(chart).to_have_attribute("aria-label", re.compile(CHARTS[measure]), timeout=RUN_MS)
        with page.expect_download() as download:
            page.get_by_role("button", name="CSV").click()
        rows = list(csv.reader(download.value.path().read_text().splitlines()))
        assert rows[0] == ["strength", "joy", "random direction, same norm", "baseline"]
        curves = np.array([row[1:] for row in rows[1:]], float)
        assert curves[1] == pytest.approx(curves[0, 2], rel=1e-3), "a strength of nothing changes nothing"
        assert abs(np.diff(curves[:, 0])).min() > 1e-3, measure
        if measure == "target":
            expected = [target(server, " wonderful", [steer(scale)]) for scale in (-0.3, 0.0, 0.3)]
            assert curves[:, 0] == pytest.approx(expected, rel=1e-3)
    sent = [json.loads(body) for body in bodies if "steer" in body][-1]
    random = [op["vector"] for op in sent["interventions"] if "data" in op.get("vector", {})]
    assert len(random) == 3
    values = np.frombuffer(base64.b64decode(random[0]["data"]), np.float32)
    assert np.linalg.norm(values) == pytest.approx(np.linalg.norm(direction), rel=1e-5)
    assert abs(values @ direction) < 0.3 * np.linalg.norm(direction) ** 2


CHARTS = {"target": "log-probability of “ won", "projection": "mean projection", "perplexity": "^perplexity"}


def target(server: Server, token: str, operations: list[dict[str, Any]]) -> float:
    """Return the log-probability of a token after the page's prompt."""
    lens = {"op": "logit_lens", "layers": [-1], "top_k": 0, "targets": [token], "where": {"positions": [-1]}}
    lens["name"] = "lens"
    answer = asked(server, prompt="I think dogs are", max_tokens=1, interventions=[*operations, lens])
    (layer,) = answer["choices"][0]["interventions"]["results"]["lens"]["layers"].values()
    return float(layer[0]["targets"][0]["logprob"])


def vector_row(server: Server, name: str, layer: int) -> Any:
    (vector,) = httpx.get(f"{server.base_url}/v1/vectors", params={"name": name}).json()["data"]
    content = httpx.get(f"{server.base_url}/v1/vectors/{vector['id']}/content").content
    return safetensors.numpy.load(content)[f"layers.{layer}.output"]


def test_the_lens_shows_what_layers_would_say(server: Server, open_page: Open) -> None:
    page = open_page(link(server.base_url, view="lens", prompt=PROMPT, sampling={"maxTokens": 4}))
    press(page)
    lens = {"op": "logit_lens", "layers": "all", "top_k": 1, "name": "lens"}
    answer = asked(server, prompt=PROMPT, max_tokens=4, interventions=[lens])["choices"][0]
    layers = answer["interventions"]["results"]["lens"]["layers"]
    grid = page.get_by_role("grid")
    heads = grid.locator("thead th").all_text_contents()[1:]
    prompt = tokens(server)
    assert heads[: len(prompt)] == [visible(token) for token in prompt]
    assert len(heads) == len(prompt) + 3
    rows = grid.locator("tbody tr").all()
    assert len(rows) == 30
    for row, layer in ((0, "29"), (14, "15"), (29, "0")):
        shown = rows[row].locator("td").all_text_contents()
        assert shown == [visible(place["top"][0]["token"]) for place in layers[layer]]
    last = rows[0].locator("td").nth(len(prompt) - 1)
    assert last.text_content() == "·Paris"
    last.hover()
    expect(page.locator(".details")).to_contain_text("·Paris")
    last.click()
    ranks = page.get_by_role("img", name=re.compile("Rank of ·Paris"))
    expect(ranks.locator("circle")).to_have_count(30)
    assert ranks.locator("circle").last.text_content() == "29: 1.00"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    name = page.evaluate("() => document.activeElement.getAttribute('aria-label')")
    assert name.startswith(f"layer 28, after {visible(prompt[-2])}")
    shoot(page, "lens-light")
    page.emulate_media(color_scheme="dark")
    shoot(page, "lens-dark")


def test_the_lens_comes_as_the_tokens_do(server: Server, open_page: Open) -> None:
    state = {"view": "lens", "prompt": PROMPT, "sampling": {"maxTokens": 48}}
    page = open_page(link(server.base_url, **state), size=(390, 844))
    page.evaluate(
        """() => {
            window.widths = new Set();
            const look = () => window.widths.add(document.querySelectorAll("[role=grid] thead th").length);
            new MutationObserver(look).observe(document.body, {childList: true, subtree: true});
        }"""
    )
    press(page)
    usage = asked(server, prompt=PROMPT, max_tokens=48)["usage"]
    heads = page.get_by_role("grid").locator("thead th")
    expect(heads).to_have_count(usage["total_tokens"])  # of each token but the last, and of the layers
    assert len(page.evaluate("() => [...window.widths].filter(Boolean)")) > 2, "it grows as it is written"
    frame = page.locator(".grid-frame").bounding_box()
    last = page.get_by_role("gridcell", name="layer 29, after ·of: ·Paris,").bounding_box()
    assert frame
    assert last
    end = frame["x"] + frame["width"] - 48  # where the map fades
    assert frame["x"] < last["x"] < last["x"] + last["width"] < end + 1, "it opens there"


@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_generated_pieces_of_characters_are_shown_as_those_of_a_prompt(
    server: Server, open_page: Open, kind: str
) -> None:
    piece = tokens(server, "🦜")[0]
    assert "\ufffd" not in piece
    said = [{"role": "user", "content": "Draw a bird."}]
    given = {"kind": kind, "prompt": PROMPT, "messages": said, "sampling": {"maxTokens": 4}}
    ids = httpx.post(f"{server.base_url}/v1/tokenize", json={"prompt": "🦜"}).json()["tokens"]

    def force(route: Route) -> None:
        body = {**json.loads(route.request.post_data or ""), "allowed_token_ids": [ids[0]["id"]]}
        route.continue_(post_data=json.dumps(body))

    for view in ("lens", "activations"):
        page = open_page(link(server.base_url, view=view, **given))
        page.route("**/v1/completions", force)
        page.route("**/v1/chat/completions", force)
        press(page)
        if view == "lens":
            shown = page.get_by_role("grid").locator("thead th").all_text_contents()
        else:
            region = page.get_by_role("region", name=re.compile("Norm after layer"))
            shown = region.locator(".heated span").all_text_contents()
        assert shown[-3:] == [piece] * 3, shown


def shown_in(page: Page, section: str) -> list[float]:
    cells = page.get_by_role("region", name=section).locator("table td").all_text_contents()
    return [float(text) for text in cells]


def test_attention_is_shown_head_by_head(server: Server, open_page: Open) -> None:
    page = open_page(
        link(server.base_url, view="attention", prompt=PROMPT, attention={"layer": 3, "head": 2})
    )
    press(page)
    expect(page.get_by_role("button", name=re.compile("^Head "))).to_have_count(9)
    capture = {
        "op": "capture",
        "at": "layers.3.attn.pattern",
        "dtype": "float32",
        "where": {"phase": "prompt"},
        "name": "p",
    }
    answer = asked(server, prompt=PROMPT, max_tokens=1, interventions=[capture])["choices"][0]
    tensor = answer["interventions"]["results"]["p"]["points"]["layers.3.attn.pattern"]
    pattern = np.frombuffer(base64.b64decode(tensor["data"]), np.float32).reshape(tensor["shape"])
    last = page.get_by_role("grid").locator("tbody tr").last.locator("td")
    for key, share in enumerate(pattern[-1, 2]):
        label = last.nth(key).get_attribute("aria-label")
        assert label is not None
        assert float(label.rsplit(": ", 1)[1].removesuffix(" %")) == pytest.approx(100 * share, abs=0.6)
    shoot(page, "attention-light")
    page.emulate_media(color_scheme="dark")
    shoot(page, "attention-dark")


def test_patching_finds_where_the_answer_is(server: Server, open_page: Open) -> None:
    page = open_page(link(server.base_url, view="patching"))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    press(page)
    grid = page.get_by_role("grid")
    grid.wait_for()
    assert len([url for url in requests if url.endswith("/completions")]) == 2, "one to read, one for the map"
    rows = grid.locator("tbody tr")
    assert rows.count() == 30
    top = rows.first.locator("td").all_text_contents()
    assert top[-1] == "100", "the last layer's last value is all that the answer is made of"
    assert set(top[:-1]) == {"0"}
    shoot(page, "patching-light")
    page.emulate_media(color_scheme="dark")
    shoot(page, "patching-dark")
    bottom = [int(text) for text in rows.last.locator("td").all_text_contents()]
    assert max(bottom[:-1]) > 30 > abs(bottom[-1]), "early, it is the subject that decides"

    def lose_a_number(route: Route) -> None:
        if "patch" not in (route.request.post_data or ""):
            return route.continue_()
        answer = route.fetch()
        content = answer.json()
        (lens,) = content["choices"][1]["interventions"]["results"]["lens"]["layers"].values()
        lens[0]["targets"][0]["logprob"] = None
        return route.fulfill(response=answer, json=content)

    page.route("**/v1/completions", lose_a_number)
    press(page)
    lost = rows.last.locator("td").first
    expect(lost).to_have_text("?")
    expect(lost).to_have_attribute("aria-label", re.compile("no finite number"))
    assert rows.first.locator("td").all_text_contents() == top


VIEWS: dict[str, dict[str, Any]] = {
    "generate": {},
    "sweep": {"sweep": {"from": -0.3, "to": 0.3, "steps": 2}},
    "lens": {"lens": {"every": 10, "topK": 2, "steered": True}},
    "activations": {"activations": {"layer": 12, "vector": "joy", "steered": True}},
    "attention": {},
    "patching": {"patching": {"clean": "The capital of France is", "corrupted": "The capital of Italy is"}},
}


LARGE = "patching, as a file"
"""A map whose values are too many to come inside the answer."""

STRENGTHS: dict[str, tuple[float, dict[str, str], dict[str, Any] | None]] = {
    "add": (6.0, {}, None),
    "norm_match": (0.5, {"range": "2:-1"}, {"range": [2, -1]}),
    "project_out": (
        2.0,
        {"phase": "prompt", "exceptPositions": "0"},
        {"phase": "prompt", "exclude": {"positions": [0]}},
    ),
    "clamp": (20.0, {"positions": "1, -1"}, {"positions": [1, -1]}),
    "replace": (12.0, {"phase": "generated"}, {"phase": "generated"}),
}
"""By mode: a strength, and where, as the page's fields and as the API have it."""


def urls(page: Page) -> list[str]:
    """Return what the page asks for from now on; the list grows."""
    found: list[str] = []
    page.on("request", lambda request: found.append(request.url))
    return found


def numbers_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)]


def drawn(page: Page, view: str) -> list[float]:
    """Return the numbers that a view shows: those that a program for it prints."""
    if view == "activations":
        return shown_in(page, "Norm after layer 12") + shown_in(page, "Probe along joy")
    cells = page.get_by_role("grid").locator("tbody tr")
    if view == "lens":  # how likely the first token is after the prompt, in percent, the first layer first
        last = [row.locator("td").nth(len(PROMPT.split())) for row in reversed(cells.all())]
        labels = [cell.get_attribute("aria-label") or "" for cell in last]
        return [numbers_in(label.rpartition(", ")[2])[0] for label in labels]
    return [float(text) for row in reversed(cells.all()) for text in row.locator("td").all_text_contents()]


def told(view: str, text: str, num_rows: int) -> list[float]:
    """Return the same numbers of what a program printed."""
    if view == "activations":
        return [number for line in text.splitlines()[-2:] for number in numbers_in(line)]
    if view == "lens":
        rows = [line for line in text.splitlines() if re.match(r"\d+ \[", line)][:num_rows]
        return [100 * numbers_in(line.rpartition("[")[2])[0] for line in rows]
    return [100 * number for line in text.splitlines() for number in numbers_in(line)[1:]]


def test_what_is_copied_does_the_same(server: Server, open_page: Open, tmp_path: Path) -> None:
    programs: list[str] = []
    shown: dict[str, list[float]] = {}
    written = asked(server, prompt=PROMPT, max_tokens=6, interventions=[steer()])["choices"][0]["text"]
    for view, state in {**VIEWS, LARGE: {}}.items():
        name = "patching" if view == LARGE else view
        steering = [JOY | {"where": {"range": "0:"}}] if view == "lens" else [JOY]
        page = open_page(
            link(server.base_url, view=name, prompt=PROMPT, sampling=SHORT, steering=steering, **state)
        )
        asked_for = urls(page)
        press(page)
        assert any("/v1/results/" in url for url in asked_for) == (view == LARGE)
        if view in {"lens", "activations", "patching", LARGE}:
            shown[view] = drawn(page, view)
        ran = subprocess.run(
            ["bash", "-c", copied(page, "curl")], capture_output=True, text=True, timeout=60, check=True
        )
        answer = json.loads(ran.stdout)
        assert "choices" in answer, f"{view}: {ran.stdout[:500]}"
        if name == "patching":
            assert len(answer["choices"]) == 1 + len(shown[view])
        if view in {"generate", "lens", "activations"}:
            assert answer["choices"][0]["text"] == written, view
        programs += [copied(page, "Python"), copied(page, "trace")]
    printed = run_programs(tmp_path, *programs)
    views = [*VIEWS, LARGE]
    assert len(printed) == 2 * len(views)
    for view, pair in zip(views, zip(printed[::2], printed[1::2], strict=True), strict=True):
        for how, text in zip(("Python", "trace"), pair, strict=True):
            assert text.strip(), f"{view} as {how} prints nothing"
            if view in {"generate", "lens", "activations"}:
                assert text.startswith(written), f"{view} as {how}: {text[:300]}"
            if view in shown and (how == "trace" or view in {"patching", LARGE}):
                rounded = 0.006 if view == "activations" else 1.1
                expected = pytest.approx(shown[view], rel=0.05, abs=rounded)
                assert told(view, text, len(shown[view])) == expected, f"{view} as {how}: {text[:600]}"


def test_a_trace_steers_as_the_api_does_in_every_mode(
    server: Server, open_page: Open, tmp_path: Path
) -> None:
    programs, expected = [], []
    for mode, (scale, fields, where) in STRENGTHS.items():
        steering = [JOY | {"mode": mode, "scale": scale, "where": fields}]
        page = open_page(link(server.base_url, prompt=PROMPT, sampling=SHORT, steering=steering))
        programs.append(copied(page, "trace"))
        operation = steer(scale) | {"mode": mode} | ({"where": where} if where else {})
        answer = asked(server, prompt=PROMPT, max_tokens=6, interventions=[operation])
        expected.append(answer["choices"][0]["text"])
    plain = asked(server, prompt=PROMPT, max_tokens=6)["choices"][0]["text"]
    assert plain not in expected, "each does something"
    assert [text.removesuffix("\n") for text in run_programs(tmp_path, *programs)] == expected


def test_views_with_their_pictures_are_accessible_and_fit(server: Server, open_page: Open, axe: str) -> None:
    for view, state in VIEWS.items():
        page = open_page(
            link(server.base_url, view=view, prompt=PROMPT, sampling=SHORT, steering=[JOY], **state),
            bypass_csp=True,
        )
        press(page)
        schemes: list[tuple[Literal["light", "dark"], int]] = [("light", 1600), ("dark", 360)]
        for scheme, width in schemes:
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            assert faults(page, axe) == [], f"{view}, {scheme}"
            assert not is_too_wide(page), f"{view} at {width}"
            shoot(page, f"{view}-{width}-{scheme}")
