"""What routes pass through: whole answers, streams with their comments, interventions' results."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.results import CaptureResult, ChoiceInterventions, TensorLink
from api_schemas.tensors import TensorObject
from app.services.streaming import COMMENT
from tests.fakes.engine import FakeBehaviour
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.test_training import PULLS, TRAIN

READS = [
    {"op": "capture", "at": "layers.1.output", "name": "resid"},
    {"op": "probe", "at": ["layers.2.output"], "weights": [1.0] * 8},
    {"op": "logit_lens", "layers": [0, 1], "top_k": 2, "targets": [7]},
    {"op": "steer", "at": "layers.1.output", "vector": [1.0] * 8},
]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Check the framing of a stream and return its events without the last, ``[DONE]``."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


async def test_operations_may_be_for_some_prompts_only(serve: Serve, error_of: ErrorCheck):
    async with serve(max_operations=2) as server:
        probe: dict[str, Any] = {"op": "probe", "at": "layers.2.output", "weights": [1.0] * 8}
        probes = [probe | {"name": f"of_{prompt}", "prompts": [prompt]} for prompt in range(3)]
        body: dict[str, Any] = {
            "prompt": ["a b", "c d", "e f"],
            "n": 2,
            "max_tokens": 2,
            "interventions": [READS[0], *probes],
        }
        answer = (await server.complete(**body)).json()
        results = [set(choice["interventions"]["results"]) for choice in answer["choices"]]
        assert results == [{"resid", f"of_{prompt}"} for prompt in (0, 0, 1, 1, 2, 2)]
        error_of(await server.complete(**body | {"prompt": ["a b", "c d"]}), 400, "invalid_value")
        messages = [{"role": "user", "content": "a"}]
        chat = {"messages": messages, "interventions": probes[1:2]}
        for stray in ({}, {"prompt": ["a", "b"]}):  # a field that chats do not have
            error_of(
                await server.client.post("/v1/chat/completions", json=chat | stray), 400, "invalid_value"
            )


async def test_a_texts_tokens_are_returned(serve: Serve, error_of: ErrorCheck):
    async with serve() as server:
        answer = await server.client.post("/v1/tokenize", json={"prompt": "one two"})
        assert [token["text"] for token in answer.json()["tokens"]] == [" one", " two"]
        messages = [{"role": "user", "content": "three"}]
        answer = await server.client.post("/v1/tokenize", json={"messages": messages})
        assert len(answer.json()["tokens"]) == 1
        wrong: tuple[tuple[dict[str, Any], str], ...] = (
            ({}, "prompt"),
            ({"prompt": "a", "messages": messages}, "prompt"),
            ({"prompt": ["a"]}, "prompt.0"),
            ({"prompt": "a", "more": 1}, "more"),
            ({"messages": messages, "more": 1}, "more"),
        )
        for body, param in wrong:
            answer = await server.client.post("/v1/tokenize", json=body)
            error_of(answer, 422, "invalid_shape")
            assert answer.json()["error"]["param"] == param


async def test_no_request_asks_for_more_choices_than_one_may(serve: Serve, error_of: ErrorCheck):
    async with serve(max_choices=6) as server:
        assert (await server.complete(prompt=["a", "b"], n=3)).status_code == 200
        for body in ({"prompt": ["a"] * 7}, {"prompt": ["a", "b"], "n": 4}, {"n": "7"}, {"n": 2**40}):
            assert "6 choices" in error_of(await server.complete(**body), 400, "invalid_value")
        messages = [{"role": "user", "content": "a"}]
        chat = await server.client.post("/v1/chat/completions", json={"messages": messages, "n": 7})
        error_of(chat, 400, "invalid_value")
        assert server.engine.num_calls == 1


@pytest.mark.parametrize("inline_tensor_bytes", [10, 100_000])
async def test_answers_fit_the_schema_that_clients_use(serve: Serve, inline_tensor_bytes: int):
    async with serve(inline_tensor_bytes=inline_tensor_bytes) as server:
        whole = (await server.complete(interventions=READS)).json()
        events = events_of(await server.complete(interventions=READS, stream=True))
        for answer in (whole, *events):
            result = ChoiceInterventions.model_validate(answer["choices"][0]["interventions"]).results[
                "resid"
            ]
            assert isinstance(result, CaptureResult)
            kind = TensorLink if inline_tensor_bytes == 10 else TensorObject
            assert isinstance(result.points["layers.1.output"], kind)


async def test_the_answer_to_code_has_its_tier(serve: Serve):
    code = [{"op": "trace", "code": "x = model.layers[1].output.save()"}]
    async with serve() as server:
        whole = (await server.complete(interventions=code, n=2, max_tokens=3)).json()
        events = events_of(await server.complete(interventions=code, max_tokens=3, stream=True))
        fields = [choice["interventions"] for choice in (*whole["choices"], events[-1]["choices"][0])]
        assert [field["provenance"] for field in fields] == [{"tier": "tap"}] * 3
        assert not any("applied" in field for field in fields)
        assert ["provenance" in event["choices"][0]["interventions"] for event in events] == [
            *(False, False, True)
        ]
        for field in fields:
            ChoiceInterventions.model_validate(field)


async def test_large_captures_are_fetched_by_url_until_they_expire(
    serve: Serve, error_of: ErrorCheck, monkeypatch: pytest.MonkeyPatch
):
    async with serve(inline_tensor_bytes=10, result_ttl_s=3600) as server:
        body = (await server.complete(interventions=READS, max_tokens=2)).json()
        sent = body["choices"][0]["interventions"]["results"]["resid"]["points"]["layers.1.output"]
        response = await server.client.get(sent["url"])
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/safetensors"
        assert int(response.headers["content-length"]) == len(response.content)
        np.testing.assert_array_equal(load(response.content)[sent["key"]][:, 0], [0, 1, 2, 3])
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
        monkeypatch.setattr("app.storage.results.time", later)
        error_of(await server.client.get(sent["url"]), 404, "result_not_found")


async def test_ids_of_no_result_are_not_found(serve: Serve):
    async with serve() as server:
        for result_id in ("unknown", "..%2f..%2fetc%2fpasswd", "%00", "a" * 2000, "%ff"):
            response = await server.client.get(f"/v1/results/{result_id}")
            assert response.status_code == 404
            assert response.json()["error"]["code"] in {"result_not_found", "not_found"}


async def test_a_capture_beyond_the_whole_store_fails_the_request(serve: Serve, error_of: ErrorCheck):
    async with serve(inline_tensor_bytes=10, result_store_bytes=100) as server:
        error_of(await server.complete(interventions=READS), 400, "capture_too_large")
        # The first event already has the prompt's rows, so the stream fails with a status as well.
        error_of(await server.complete(interventions=READS, stream=True), 400, "capture_too_large")
        assert server.engine.num_running == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError(ErrorCode.INTERVENTION_FAILED, "the patch met no row"), "intervention_failed"),
        (RuntimeError("secret"), "internal_error"),
    ],
)
async def test_an_error_in_mid_stream_is_an_event_and_then_the_end(serve: Serve, error: Exception, code: str):
    async with serve(FakeBehaviour(stream_error=error, num_events_before_error=2)) as server:
        response = await server.complete(stream=True)
        assert response.status_code == 200
        events = events_of(response)
        assert len(events) == 3
        assert events[2]["error"]["code"] == code
        assert "secret" not in response.text
        assert server.engine.num_running == 0


async def test_an_error_before_the_first_event_has_its_own_status(serve: Serve, error_of: ErrorCheck):
    error = ApiError(ErrorCode.ENGINE_CAPTURE_FULL, "full")
    async with serve(FakeBehaviour(stream_error=error, num_events_before_error=0)) as server:
        response = await server.complete(stream=True)
        error_of(response, 503, "engine_capture_full")
        assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_misspelt_field_is_refused_with_the_right_name(
    serve: Serve, error_of: ErrorCheck, path: str, stream: bool
):
    of_chat = {"messages": [{"role": "user", "content": "a"}]}
    prompt = of_chat if "chat" in path else {"prompt": "a b"}
    async with serve() as server:
        body: dict[str, Any] = {**prompt, "max_tokens": 2, "stream": stream}
        for name in ("interventoins", "intervention", "INTERVENTIONS", "intervetions", "interventions "):
            answer = await server.client.post(path, json=body | {name: READS})
            assert "did you mean `interventions`?" in error_of(answer, 422, "invalid_shape")
        nested = await server.client.post(path, json=body | {"extra_body": {"interventions": READS}})
        error_of(nested, 422, "invalid_shape")
        for known in ("user", "instructions", "invitations"):  # vLLM ignores what it does not know
            assert (await server.client.post(path, json=body | {known: "x"})).status_code == 200


INTERVAL_S = 0.05
PAUSE_S = 0.3
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two three"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one two three"}]},
}


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve(FakeBehaviour(delay_s=PAUSE_S), sse_keep_alive_s=INTERVAL_S) as found:
        yield found


def frames(text: str) -> list[str]:
    found = text.split("\n\n")
    assert found.pop() == ""
    return [f"{one}\n\n" for one in found]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_has_comments_before_its_first_event_and_between_events(
    server: Server, path: str
) -> None:
    body = {**BODIES[path], "max_tokens": 2, "interventions": [{"op": "capture", "at": "layers.1.output"}]}
    answer = await server.client.post(path, json={**body, "stream": True})
    found = frames(answer.text)
    events = [one for one in found if one != COMMENT]
    assert found[0] == COMMENT
    assert COMMENT in found[found.index(events[0]) : found.index(events[-1])]
    server.engine.behaviour.delay_s = 0
    at_once = await server.client.post(path, json={**body, "stream": True})
    assert frames(at_once.text) == events
    assert [json.loads(one.removeprefix("data: "))["choices"] for one in events[:-1]]


async def test_an_error_after_a_comment_is_an_event(server: Server) -> None:
    server.engine.behaviour.delay_s = 0
    server.engine.behaviour.error = ApiError(ErrorCode.QUEUE_FULL, "full")
    refused = await server.complete(stream=True)
    assert refused.status_code == 429
    server.engine.behaviour.delay_s = PAUSE_S
    answer = await server.complete(stream=True)
    assert answer.status_code == 200
    found = [one for one in frames(answer.text) if one != COMMENT]
    assert json.loads(found[0].removeprefix("data: "))["error"]["code"] == "queue_full"
    assert found[1:] == ["data: [DONE]\n\n"]
    await server.until_idle()


async def test_streams_of_vllms_handlers_have_them_too(server: Server) -> None:
    body = {"model": "m", "max_tokens": 1, "stream": True, "idle": "idle"}
    answer = await server.client.post("/v1/messages", json=body)
    first, *between, last = frames(answer.text)
    assert (first, last) == ("data: {}\n\n", "data: [DONE]\n\n")
    assert set(between) == {COMMENT}


async def test_a_training_that_waits_has_them(server: Server) -> None:
    server.engine.behaviour = FakeBehaviour(delay_s=PAUSE_S, pulls=PULLS)
    answer = await server.client.post("/v1/vectors/train", json={**TRAIN, "stream": True})
    found = frames(answer.text)
    assert found[0] == COMMENT
    events = [one for one in found if one != COMMENT]
    assert json.loads(events[-2].removeprefix("data: "))["vector"]["name"] == "mood"
    refused = await server.client.post("/v1/vectors/train", json={**TRAIN, "layers": "9", "stream": True})
    assert refused.status_code == 400


async def test_by_default_there_are_none(serve: Serve) -> None:
    async with serve(FakeBehaviour(delay_s=0.1)) as server:
        answer = await server.complete(stream=True, max_tokens=2)
        assert ":" not in {line[:1] for line in answer.text.splitlines()}
