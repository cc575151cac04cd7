"""Interventions on ``/v1/responses`` and ``/v1/messages``: they do what they do on chat completions."""

from __future__ import annotations

import itertools
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.harness import random_vector
from tests.e2e.live import MODEL, Live

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

TEXT = "Name a colour."
NUM_TOKENS = 12
STEER = {
    "op": "steer",
    "at": "layers.15.output",
    "vector": random_vector(0),
    "scale": 0.5,
    "mode": "norm_match",
}
GENERATED = {"where": {"phase": "generated"}}
CAPTURE = {"op": "capture", "at": "layers.10.output", "name": "resid"} | GENERATED
LENS = {"op": "logit_lens", "layers": [3, 20], "top_k": 2, "name": "lens"} | GENERATED
PROBE = {"op": "probe", "at": "layers.15.output", "weights": random_vector(1), "name": "probe"}
CODE = "h = model.layers[5].output.float().save()"
OPERATIONS: dict[str, list[Any]] = {
    "declared": [STEER, CAPTURE, LENS, PROBE],
    "code": [{"op": "trace", "code": CODE, "name": "t"}],
}
HUGE = {"op": "capture", "at": "logits", "dtype": "float32"} | GENERATED
REFUSED: dict[str, tuple[list[Any], str]] = {
    "layer": ([{"op": "capture", "at": "layers.99.output"}], "unknown_layer"),
    "position": ([{**CAPTURE, "where": {"positions": [5000]}}], "position_out_of_range"),
    "limit": ([{**HUGE, "name": str(number)} for number in range(8)], "capture_too_large"),
}
APIS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": TEXT, "max_output_tokens": NUM_TOKENS},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": NUM_TOKENS},
}


async def send(live: Live, path: str, operations: list[Any], **body: Any) -> httpx.Response:
    fields = {"model": MODEL, "temperature": 0} | APIS[path] | body
    return await live.http.post(path, json=fields | {"interventions": operations})


async def chat(live: Live, operations: list[Any]) -> Any:
    body = {"messages": APIS["/v1/messages"]["messages"], "max_tokens": NUM_TOKENS}
    answer = await live.post("/v1/chat/completions", **body, interventions=operations)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def text_of(answer: dict[str, Any]) -> str:
    blocks = answer["content"] if "content" in answer else answer["output"][-1]["content"]
    return str(blocks[0]["text"])


def events_of(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    frames = [frame for frame in answer.text.split("\n\n") if frame]
    return [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "provenance"}


@pytest.mark.parametrize("operations", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("path", APIS)
async def test_text_and_results_are_those_of_a_chat(live: Live, path: str, operations: list[Any]) -> None:
    expected = await chat(live, operations)
    answer = await send(live, path, operations)
    assert answer.status_code == 200, answer.text
    assert text_of(answer.json()) == expected["message"]["content"]
    assert without_times(answer.json()["interventions"]) == without_times(expected["interventions"])
    assert (await send(live, path, [])).json().keys() == answer.json().keys() - {"interventions"}


@pytest.mark.parametrize("path", APIS)
async def test_events_of_a_stream_have_what_was_read_for_their_text(live: Live, path: str) -> None:
    expected = await chat(live, OPERATIONS["declared"])
    events = events_of(await send(live, path, OPERATIONS["declared"], stream=True))
    pieces = [event for event in events if event["type"].endswith((".delta", "content_block_delta"))]
    texts = [event["delta"] if path == "/v1/responses" else event["delta"]["text"] for event in pieces]
    assert "".join(texts) == expected["message"]["content"]
    last = next(event for event in events if event["type"] in {"response.incomplete", "message_delta"})
    rest = last.get("response", last)["interventions"]
    parts = [*(event["interventions"] for event in pieces if "interventions" in event), rest]
    assert len(parts) > NUM_TOKENS // 2
    for name in ("resid", "lens", "probe"):
        found = [part["results"][name]["positions"] for part in parts if name in part["results"]]
        assert list(itertools.chain(*found)) == expected["interventions"]["results"][name]["positions"]
    assert rest["applied"] == expected["interventions"]["applied"]


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", APIS)
async def test_a_refusal_is_ours_and_has_its_status(
    live: Live, path: str, stream: bool, refused: str
) -> None:
    operations, code = REFUSED[refused]
    answer = await send(live, path, operations, stream=stream)
    if answer.status_code == 200:  # it has failed while it was streamed
        assert stream
        assert refused == "limit"
        last = events_of(answer)[-1]
        assert last["type"] == "error"
        assert "one request may capture" in last.get("error", last)["message"]
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert set((await live.held()).values()) == {0}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", APIS)
async def test_a_wrong_request_without_interventions_is_the_clients_error(
    live: Live, path: str, *, stream: bool
) -> None:
    grammar = {"type": "json_schema", "name": "wrong", "schema": {"type": "string", "pattern": "("}}
    field = "text" if path == "/v1/responses" else "output_config"
    answer = await send(live, path, [], stream=stream, **{field: {"format": grammar}})
    if stream:
        last = events_of(answer)[-1]
        assert last["type"] == "error"
        error = last.get("error", last)
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert "The grammar cannot be used" in error["message"]
    assert error["type"] == ("error" if path == "/v1/responses" and stream else "invalid_request_error")


async def test_official_clients_send_operations_and_read_results(live: Live) -> None:
    expected = await chat(live, [STEER, PROBE])
    extra = {"interventions": [STEER, PROBE], "temperature": 0}
    client = openai.AsyncOpenAI(base_url=f"{live.http.base_url}/v1", api_key="unused")
    response = await client.responses.create(
        model=MODEL, input=TEXT, max_output_tokens=NUM_TOKENS, extra_body=extra
    )
    assert response.output_text == expected["message"]["content"]
    assert response.model_extra is not None
    assert response.model_extra["interventions"]["results"] == expected["interventions"]["results"]
    claude = anthropic.AsyncAnthropic(base_url=str(live.http.base_url), api_key="unused")
    message = await claude.messages.create(
        model=MODEL, max_tokens=NUM_TOKENS, messages=[{"role": "user", "content": TEXT}], extra_body=extra
    )
    assert message.model_extra is not None
    assert message.model_extra["interventions"]["results"] == expected["interventions"]["results"]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_preset_behind_the_models_name_steers_and_is_in_the_answer(
    live: Live, path: str, *, streams: bool
) -> None:
    kept = await live.http.post("/v1/presets", json={"name": "coloured", "interventions": [STEER, LENS]})
    assert kept.status_code == 201, kept.text
    written = (await send(live, path, [STEER, LENS])).json()
    name = f"{MODEL}:coloured"
    body = {"model": name, "temperature": 0, "stream": streams} | APIS[path]
    answer = await live.http.post(path, json=body)
    if not streams:
        found = answer.json()
        assert (found["model"], text_of(found)) == (name, text_of(written))
        presets = found["interventions"]["provenance"].pop("presets")
        assert presets[0].startswith("coloured@")
        assert found["interventions"]["results"] == written["interventions"]["results"]
        return
    holders = [event.get("response") or event.get("message") for event in events_of(answer)]
    names = {one["model"] for one in holders if one is not None}
    assert names == {name}
    deltas = [event.get("delta") for event in events_of(answer) if event["type"].endswith("delta")]
    texts = [one if isinstance(one, str) else one.get("text", "") for one in deltas]
    assert "".join(texts) == text_of(written)
