"""Presets on the real model: by each road the steered text is that of the operations written out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.e2e.server import Server
from tests.narrow_model import WIDTH

pytestmark = pytest.mark.e2e

PROMPT = "The weather in the mountains this week was"
MESSAGES: list[Any] = [{"role": "user", "content": "Describe the weather in the mountains."}]
STEER = {
    "op": "steer",
    "at": ["layers.12.output", "layers.14.output"],
    "vector": np.random.default_rng(5).standard_normal(WIDTH).round(3).tolist(),
    "mode": "norm_match",
    "scale": 0.6,
}
LENS = {"op": "logit_lens", "layers": [20], "top_k": 2, "where": {"positions": [-1]}, "name": "seen"}


@pytest.fixture(scope="module")
def client(narrow_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{narrow_server.base_url}/v1", api_key="none", max_retries=0) as client:
        for interventions in ([STEER, LENS], [{**STEER, "scale": 0.1}]):
            body = {"name": "odd", "interventions": interventions}
            client.post("/presets", body=body, cast_to=object)
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    names = [one.id for one in client.models.list()]
    assert f"{names[0]}:odd" in names
    return names[0]


def roads(model: str) -> list[dict[str, Any]]:
    """Return the arguments that name the preset, for each road, and all of them at once."""
    named, header, field = f"{model}:odd@1", {"x-nnsight-preset": "odd@1"}, {"preset": "odd@1"}
    return [
        {"model": named},
        {"model": model, "extra_headers": header},
        {"model": model, "extra_body": field},
        {"model": named, "extra_headers": header, "extra_body": field},
    ]


def done(choice: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(choice.model_extra["interventions"])
    provenance = found.pop("provenance")
    return {**found, "fingerprint": provenance["fingerprint"]}


def test_completions_by_each_road_are_those_of_the_operations(client: openai.OpenAI, model: str) -> None:
    options: Any = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    plain = client.completions.create(model=model, **options)
    body = {"interventions": [STEER, LENS]}
    written = client.completions.create(model=model, **options, extra_body=body)
    assert written.choices[0].text != plain.choices[0].text
    for road in roads(model):
        answer = client.completions.create(**options, **road)
        assert answer.model == road["model"]
        assert answer.choices[0].text == written.choices[0].text
        assert done(answer.choices[0]) == done(written.choices[0])
        provenance = answer.choices[0].model_extra["interventions"]["provenance"]
        assert provenance["presets"] == ["odd@1"]
    newest = client.completions.create(model=f"{model}:odd", **options)
    assert newest.choices[0].text != written.choices[0].text
    assert client.completions.create(model=model, **options).choices[0].text == plain.choices[0].text


def test_streamed_chats_by_each_road_are_those_of_the_operations(client: openai.OpenAI, model: str) -> None:
    options: Any = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    body = {"interventions": [STEER, LENS]}
    written = client.chat.completions.create(model=model, **options, extra_body=body)
    for road in roads(model):
        chunks = list(client.chat.completions.create(**options, **road, stream=True))
        assert {chunk.model for chunk in chunks} == {road["model"]}
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == written.choices[0].message.content
