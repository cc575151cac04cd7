"""Conditions over HTTP: names of detectors and vectors, streams, stops, flags, presets, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.answers import answer, streamed
from tests.e2e.server import Server
from tests.narrow_model import PROMPT, WIDTH

pytestmark = pytest.mark.e2e

AT = "layers.9.output"


@pytest.fixture(scope="module")
def client(narrow_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=narrow_server.base_url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def scores(client: httpx.Client) -> list[float]:
    """One number of the residual stream at each position of the answer."""
    probe = {"op": "probe", "at": AT, "weights": one_number(), "name": "p"}
    found = answer(client, probe)["interventions"]["results"]["p"]["points"][AT]
    assert isinstance(found, list)
    return found


@pytest.fixture(scope="module")
def detector(client: httpx.Client, scores: list[float]) -> dict[str, Any]:
    """Upload a detector of that number, with the median of its scores as threshold."""
    part = {"at": AT, "form": "linear", "weights": one_number()}
    body = {"name": "first", "parts": [part], "threshold": float(np.median(scores))}
    made: dict[str, Any] = client.post("/v1/detectors", json=body).json()
    return made


def one_number() -> list[float]:
    """Return weights of a number of the stream that is at its highest in the middle of the answer."""
    return [float(index == 6) for index in range(WIDTH)]


def test_a_name_has_the_detector_s_scores_and_threshold(
    client: httpx.Client, detector: dict[str, Any], scores: list[float]
) -> None:
    detect = {"op": "detect", "detector": "first@1", "name": "score"}
    flag = {"op": "flag", "when": {"detector": {"name": "first", "id": detector["id"]}}, "name": "high"}
    found = answer(client, detect, flag)["interventions"]
    assert found["results"]["score"]["scores"] == pytest.approx(scores, rel=1e-2, abs=1e-2)
    own = found["results"]["score"]["scores"]
    threshold = detector["threshold"]
    near = {index for index, score in enumerate(own) if abs(score - threshold) < 1e-2}
    wanted = {index for index, score in enumerate(own) if score >= threshold}
    assert set(found["results"]["high"]["positions"]) ^ wanted <= near
    used = [{"name": "first", "version": 1, "id": detector["id"]}]
    assert [one["detectors"] for one in found["applied"]] == [used, used]


def test_a_stream_ends_where_a_stop_holds(client: httpx.Client, scores: list[float]) -> None:
    plain = answer(client, {"op": "capture", "at": "samples", "name": "s"}, logprobs=0)
    prompt_len = len(scores) - 15
    own = scores[prompt_len:]
    first = max(range(3, 12), key=lambda index: own[index] - max(own[:index]))
    stop = {
        "op": "stop",
        "name": "enough",
        "where": {"phase": "generated"},
        "when": {
            "probe": {"at": AT, "weights": one_number()},
            "above": (own[first] + max(own[:first])) / 2,
        },
    }
    tokens = plain["logprobs"]["tokens"]
    ended = answer(client, stop)
    assert ended["text"] == "".join(tokens[: first + 1])
    assert ended["finish_reason"] == "stop"
    assert ended["stop_reason"] == {"intervention": "enough"}
    parts = streamed(client, prompt=PROMPT, max_tokens=16, ignore_eos=True, interventions=[stop])
    assert "".join(part["text"] for part in parts) == ended["text"]
    last = parts[-1]
    assert last["stop_reason"] == {"intervention": "enough"}
    assert last["interventions"]["results"]["enough"]["positions"] == [prompt_len + first]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_stops_in_the_prompt_has_a_last_event(client: httpx.Client, path: str) -> None:
    stop = {
        "op": "stop",
        "name": "s",
        "when": {"probe": {"at": AT, "weights": one_number()}, "above": -1e6},
    }
    asked = (
        {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    choices = streamed(client, path, max_tokens=4, interventions=[stop], **asked)
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == {"intervention": "s"}
    assert choices[-1]["interventions"]["results"]["s"]["positions"][0] == 0
    assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)


def test_a_condition_names_a_vector_of_the_server(client: httpx.Client) -> None:
    vectors = {"9": one_number()}
    assert client.post("/v1/vectors", json={"name": "axis", "vectors": vectors}).status_code == 201
    probe = {"at": AT, "weights": {"name": "axis"}}
    inline = {"at": AT, "weights": one_number()}
    named, numbers = (
        answer(client, {"op": "flag", "when": {"probe": one, "above": 0.0}, "name": "f"})
        for one in (probe, inline)
    )
    assert named["interventions"]["results"] == numbers["interventions"]["results"]


def test_a_preset_keeps_the_version_of_a_detector(client: httpx.Client, detector: dict[str, Any]) -> None:
    flag = {"op": "flag", "when": {"not": {"detector": "first"}}, "name": "low"}
    made = client.post("/v1/presets", json={"name": "watch", "interventions": [flag]})
    assert made.status_code == 201, made.text
    pinned = made.json()["interventions"][0]["when"]["not"]["detector"]
    assert pinned == {"name": "first@1", "id": detector["id"]}
    found = answer(client, preset="watch")["interventions"]["results"]["low"]
    assert found["type"] == "flag"


def test_marked_choices_are_counted(client: httpx.Client, detector: dict[str, Any]) -> None:
    def counted() -> float:
        lines = client.get("/metrics").text.splitlines()
        name = 'nnsight_engine_marked_choices_total{op="flag"} '
        return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = counted()
    always = {"detector": "first", "above": -1e9}
    answer(client, {"op": "flag", "when": always, "name": "a"}, {"op": "flag", "when": always, "name": "b"})
    assert detector["name"] == "first"
    assert counted() == before + 1


@pytest.mark.parametrize(
    ("operation", "code", "param"),
    [
        ({"op": "flag", "when": {"detector": "nobody"}}, "unknown_detector", "interventions.0.when.detector"),
        ({"op": "detect", "detector": "first@9"}, "unknown_detector", "interventions.0.detector"),
        (
            {"op": "flag", "when": {"any": [{"probe": {"at": AT, "weights": [1.0]}, "above": 0}]}},
            "wrong_width",
            "interventions.0.when.any.0.probe.weights",
        ),
        (
            {"op": "stop", "when": {"probe": {"at": "logits", "weights": [1.0]}, "above": 0}},
            "unsupported_at_point",
            "interventions.0.when.probe.at",
        ),
        (
            {
                "op": "ablate",
                "at": "layers.3.output",
                "when": {"probe": {"at": AT, "weights": one_number()}, "above": 0},
            },
            "unsupported_combination",
            "interventions.0.when",
        ),
        ({"op": "flag", "when": {"all": []}}, "invalid_value", "interventions.0.when.all"),
        (
            {"op": "flag", "when": {"any": [{"detector": "first"}] * 16}, "prompts": [0] * 5},
            "invalid_value",
            "interventions.0.prompts",
        ),
        ({"op": "flag"}, "invalid_shape", "interventions.0.when"),
        ({"op": "capture", "at": AT, "when": {"detector": "first"}}, "invalid_shape", "interventions.0.when"),
    ],
)
def test_bad_conditions_are_refused(
    client: httpx.Client, detector: dict[str, Any], operation: dict[str, Any], code: str, param: str
) -> None:
    assert detector["name"] == "first"
    body = {"prompt": PROMPT, "max_tokens": 2, "interventions": [operation]}
    error = client.post("/v1/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
