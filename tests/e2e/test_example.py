"""The example does what it says, against the real server."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
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

pytestmark = pytest.mark.e2e

LAYER = 15
NUM_LAYERS = 30


def test_steered_text_differs_and_leans_towards_the_direction(server: Server) -> None:
    with Client(server.base_url) as client:
        direction = capture_means(client, CHEERFUL, LAYER) - capture_means(client, GLOOMY, LAYER)
        comparisons = compare(client, PROMPTS, direction, LAYER, 0.2, max_tokens=24)
    assert [row.prompt for row in comparisons] == list(PROMPTS)
    assert all(row.steered != row.baseline for row in comparisons)
    assert all(row.steered_projection > row.baseline_projection for row in comparisons)


def test_the_direction_separates_sentences_that_it_was_not_made_from(server: Server) -> None:
    with Client(server.base_url) as client:
        direction = capture_means(client, CHEERFUL, LAYER) - capture_means(client, GLOOMY, LAYER)
        glad = capture_means(client, ["The children laughed and danced in the sunshine."], LAYER)
        sad = capture_means(client, ["The children were sick and cried in the dark."], LAYER)
    assert np.dot(glad, direction) > np.dot(sad, direction)


def test_no_scale_changes_nothing(server: Server) -> None:
    with Client(server.base_url) as client:
        direction = np.ones(576, np.float32)
        (row,) = compare(client, PROMPTS[:1], direction, LAYER, 0.0, max_tokens=8)
    assert row.steered == row.baseline


def test_the_lens_has_every_layer_and_ends_with_the_models_own_next_token(server: Server) -> None:
    with Client(server.base_url) as client:
        lens = read_lens(client, LENS_PROMPT)
    assert [row.layer for row in lens.rows] == list(range(NUM_LAYERS))
    assert lens.rows[-1].token == lens.next_token == " Paris"
    assert all(0.0 < row.probability <= 1.0 for row in lens.rows)


def test_run_by_a_person_it_prints_both_tables(server: Server) -> None:
    result = run("--base-url", server.base_url, "--max-tokens", "8")
    assert result.returncode == 0, result.stderr
    for text in ("baseline", "steered", "layers.15.output", "most likely next", "Paris"):
        assert text in result.stdout


def test_a_layer_that_is_not_there_is_told_with_the_rule(server: Server) -> None:
    result = run("--base-url", server.base_url, "--layer", "99")
    assert result.returncode == 1
    assert "unknown_layer" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_server_the_message_says_how_to_start_one() -> None:
    result = run("--base-url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert "make serve" in result.stderr
    assert "Traceback" not in result.stderr


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example as a person does."""
    command = [sys.executable, "examples/steer_sentiment.py", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
