"""First steps on the real server: the examples, the commands, the pictures of the docs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.steer_sentiment import (
    CHEERFUL,
    GLOOMY,
    LENS_PROMPT,
    PROMPTS,
    capture_means,
    compare,
    read_lens,
)
from examples.steer_sentiment import Server as Client
from tests.e2e.server import PROJECT, Server
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e

LAYER = 15
NUM_LAYERS = 30
JAVASCRIPT = PROJECT / "examples" / "javascript"


def test_steered_text_differs_and_leans_towards_the_direction(bundled_server: Server) -> None:
    with Client(bundled_server.base_url) as client:
        direction = capture_means(client, CHEERFUL, LAYER) - capture_means(client, GLOOMY, LAYER)
        comparisons = compare(client, PROMPTS, direction, LAYER, 0.2, max_tokens=24)
    assert [row.prompt for row in comparisons] == list(PROMPTS)
    assert all(row.steered != row.baseline for row in comparisons)
    assert all(row.steered_projection > row.baseline_projection for row in comparisons)


def test_the_lens_has_every_layer_and_ends_with_the_models_own_next_token(bundled_server: Server) -> None:
    with Client(bundled_server.base_url) as client:
        lens = read_lens(client, LENS_PROMPT)
    assert [row.layer for row in lens.rows] == list(range(NUM_LAYERS))
    assert lens.rows[-1].token == lens.next_token == " Paris"
    assert all(0.0 < row.probability <= 1.0 for row in lens.rows)


def test_run_by_a_person_it_prints_both_tables(bundled_server: Server) -> None:
    result = run("--base-url", bundled_server.base_url, "--max-tokens", "8")
    assert result.returncode == 0, result.stderr
    for text in ("baseline", "steered", "layers.15.output", "most likely next", "Paris"):
        assert text in result.stdout


def test_a_missing_layer_is_reported_with_the_rule(bundled_server: Server) -> None:
    result = run("--base-url", bundled_server.base_url, "--layer", "99")
    assert result.returncode == 1
    assert "unknown_layer" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_server_the_message_says_how_to_start_one() -> None:
    result = run("--base-url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert "make serve" in result.stderr
    assert "Traceback" not in result.stderr


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "examples/steer_sentiment.py", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)


def test_the_commands_steer_and_read_the_lens(bundled_server: Server) -> None:
    with Client(bundled_server.base_url) as client:
        direction = capture_means(client, CHEERFUL, LAYER) - capture_means(client, GLOOMY, LAYER)
    vector = {"name": "cheer", "vectors": {str(LAYER): direction.tolist()}}
    httpx.post(f"{bundled_server.base_url}/v1/vectors", json=vector).raise_for_status()

    def shown(*arguments: str) -> str:
        environment = {**os.environ, "NNSIGHT_ENGINE_URL": bundled_server.base_url, "COLUMNS": "100"}
        command = [sys.executable, "-m", "app", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    steered = ("--vector", "cheer", "--layer", str(LAYER), "--mode", "norm_match", "--max-tokens", "12")
    compared = shown("steer", "I think that today is", *steered, "--scale", "0.4")
    assert "cheer × 0.4 at 15" in compared
    assert "What differs is marked." in compared
    lens = shown("lens", "The Eiffel Tower is in the city of").splitlines()
    assert lens[0].split()[-1] == "·of"
    assert [line.split()[0] for line in lens[1 : NUM_LAYERS + 1]] == [
        str(n) for n in reversed(range(NUM_LAYERS))
    ]
    assert lens[1].split()[-2] == "·Paris"
    # Without arguments it is the demonstration of the first minute, at the best layer of the example.
    example = {"name": "example-joy"}
    wait_for(lambda: httpx.get(f"{bundled_server.base_url}/v1/vectors", params=example).json()["data"])
    joyful = shown("steer", "--max-tokens", "8")
    assert "example-joy × 1 at 14" in joyful
    rows = re.findall(r"│ (.+?) *│ +│ (.+?) *│", joyful)
    assert "the most relatable and endearing pets" in " ".join(right for _, right in rows)
    assert "relatable" not in " ".join(left for left, _ in rows)


@pytest.fixture(scope="module")
def javascript(npm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example for Node.js with the packages of its lock."""
    folder = tmp_path_factory.mktemp("npm") / "javascript"
    shutil.copytree(JAVASCRIPT, folder, ignore=shutil.ignore_patterns("node_modules"))
    subprocess.run([npm, "ci", "--no-progress"], cwd=folder, check=True, capture_output=True, timeout=240)
    return folder


def test_the_official_client_in_javascript_streams_the_baseline_beside_the_steered_answer(
    bundled_server: Server, javascript: Path
) -> None:
    result = run_node(javascript, "--base-url", bundled_server.base_url, "--max-tokens", "12")
    assert result.returncode == 0, result.stderr
    prompt, baseline, steered = result.stdout.splitlines()
    assert prompt == "When I woke up this morning I felt …"
    body = {"prompt": prompt.removesuffix(" …"), "max_tokens": 12, "temperature": 0}
    plain = httpx.post(f"{bundled_server.base_url}/v1/completions", json=body, timeout=60).json()
    # Others in the batch change the last bits, and in a longer text a word: so the first one is compared.
    assert first_word(baseline, "baseline: ") == first_word(plain["choices"][0]["text"])
    assert steered.startswith("steered: ")
    assert steered.removeprefix("steered: ") != baseline.removeprefix("baseline: ")
    still = run_node(
        javascript, "--base-url", f"{bundled_server.base_url}/", "--scale", "0", "--layer=-1"
    ).stdout.splitlines()
    assert first_word(still[2], "steered: ") == first_word(still[1], "baseline: ")


def first_word(text: str, label: str = "") -> str:
    assert text.startswith(label)
    return text.removeprefix(label).split()[0]


def test_in_javascript_errors_are_sentences(bundled_server: Server, javascript: Path) -> None:
    refused = run_node(javascript, "--base-url", bundled_server.base_url, "--layer", "99")
    alone = run_node(javascript, "--base-url", "http://127.0.0.1:9")
    for result, words in ((refused, "between -30 and 29, got 99"), (alone, "make serve")):
        assert result.returncode == 1
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1  # no stack


def test_in_javascript_the_key_is_our_variables_and_openais_goes_nowhere(
    javascript: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for-openai")
    seen: list[tuple[str, str]] = []
    with refusing(seen) as base_url:
        for key in ("made-up", ""):
            monkeypatch.setenv("NNSIGHT_ENGINE_KEY", key)
            assert run_node(javascript, "--base-url", f"{base_url}/").returncode == 1
    assert seen == [("/v1/models", "Bearer made-up"), ("/v1/models", "Bearer no key")]


@contextlib.contextmanager
def refusing(seen: list[tuple[str, str]]) -> Iterator[str]:
    """Refuse what is asked, on a free port; paths and keys are put into ``seen``."""

    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["authorization"]))
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_the_lock_of_the_javascript_example_names_no_place_to_download_from() -> None:
    lock = json.loads((JAVASCRIPT / "package-lock.json").read_text(encoding="utf-8"))
    wanted = json.loads((JAVASCRIPT / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert lock["packages"][""]["dependencies"] == wanted
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]


def run_node(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["node", "steer.mjs", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
