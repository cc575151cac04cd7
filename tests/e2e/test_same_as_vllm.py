"""A request without interventions is answered as by vLLM's own server, and refused with its status."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.keyed import beside_vllm
from tests.e2e.live import MODEL
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

MESSAGES = [{"role": "user", "content": "Name a colour."}]
TOOL = {
    "type": "function",
    "function": {"name": "paint", "parameters": {"type": "object", "properties": {"c": {"type": "string"}}}},
}
SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "colour",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
}

RESPONSE_SCHEMA = {"type": "json_schema", "name": "colour", "schema": SCHEMA["json_schema"]["schema"]}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("completions", {"prompt": "The Eiffel Tower is in", "max_tokens": 6}),
    "several prompts and logprobs": (
        "completions",
        {"prompt": ["Hello", "Once upon"], "max_tokens": 4, "logprobs": 3, "echo": True},
    ),
    "seeded choices": (
        "completions",
        {"prompt": "I like", "n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 5},
    ),
    "stop strings": ("completions", {"prompt": "1, 2, 3, 4, 5,", "stop": ["8"], "max_tokens": 20}),
    "token ids": ("completions", {"prompt": [504, 2345, 1234], "max_tokens": 3, "return_token_ids": True}),
    "streamed with usage": (
        "completions",
        {"prompt": "A cat", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat": (
        "chat/completions",
        {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2},
    ),
    "chat streamed": ("chat/completions", {"messages": MESSAGES, "max_tokens": 6, "stream": True}),
    "a response": ("responses", {"input": "Name a colour.", "max_output_tokens": 6}),
    "a response to a conversation": (
        "responses",
        {
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": "Name a colour."}],
            "max_output_tokens": 6,
            "metadata": {"a": "b"},
        },
    ),
    "a structured response": (
        "responses",
        {"input": "Colour?", "max_output_tokens": 24, "text": {"format": RESPONSE_SCHEMA}},
    ),
    "a response streamed": ("responses", {"input": "Name a colour.", "max_output_tokens": 6, "stream": True}),
    "a message": ("messages", {"messages": MESSAGES, "max_tokens": 6, "system": "Be brief."}),
    "a message with tools": (
        "messages",
        {
            "messages": MESSAGES,
            "max_tokens": 6,
            "tools": [{"name": "paint", "input_schema": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "none"},
        },
    ),
    "a message streamed": ("messages", {"messages": MESSAGES, "max_tokens": 6, "stream": True}),
    "tokens of a conversation": ("messages/count_tokens", {"messages": MESSAGES}),
    "tokens": ("/tokenize", {"prompt": "Hello there", "return_token_strs": True}),
    "tokens of a chat": ("/tokenize", {"messages": MESSAGES}),
    "text of tokens": ("/detokenize", {"tokens": [504, 2345, 1234]}),
    "structured output": (
        "chat/completions",
        {"messages": MESSAGES, "max_tokens": 24, "response_format": SCHEMA},
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a tool that must be called": (
        "chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 24,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "paint"}},
        },
    ),
    "an unknown model": ("completions", {"prompt": "x", "model": "nobody"}),
    "a wrong type": ("completions", {"prompt": 3.5}),
    "a bad number": ("completions", {"prompt": "x", "temperature": -1}),
    "too long": ("completions", {"prompt": "x", "max_tokens": 100000}),
    "no messages": ("chat/completions", {}),
}
"""What neither server takes."""
REFUSED_BY_HANDLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a response of an unknown model": ("responses", {"input": "x", "model": "nobody"}),
    "a response without input": ("responses", {}),
    "a response after one that there is not": ("responses", {"input": "x", "previous_response_id": "resp_x"}),
    "a message without its length": ("messages", {"messages": MESSAGES}),
    "a message that is too long": ("messages", {"messages": MESSAGES, "max_tokens": 100000}),
    "tokens of nothing": ("/tokenize", {}),
}
"""What vLLM's own handlers refuse, on routes that are passed on to them."""

STORES = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
OPERATING = (
    *("POST /reset_prefix_cache", "POST /reset_mm_cache", "POST /reset_encoder_cache"),
    *(
        "POST /sleep?level=0&mode=keep",
        "GET /is_sleeping",
        "GET /is_paused",
        "POST /wake_up",
        "GET /is_sleeping",
    ),
    *("POST /pause?mode=keep", "GET /is_paused", "GET /is_sleeping", "POST /resume", "GET /is_paused"),
    *("POST /sleep?level=7", "POST /pause?mode=never"),
)
"""Requests of an operator, one after the other."""
VOLATILE = {"id", "created", "system_fingerprint", "created_at", "item_id", "sequence_number"}


@pytest.fixture(scope="module", autouse=True)
def strict_answers() -> None:
    """Take the forms that vLLM's own server has, and compare."""


@pytest.fixture(scope="module")
def servers(narrow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[httpx.Client]]:
    options = ["--served-model-name", MODEL, "--max-model-len", "512", "--enforce-eager"]
    options += ["--dtype", "float32"]  # which ours chooses by itself on some processors
    # One sequence at a time: which prompts share a step depends on when they arrive, and moves last digits.
    options += ["--max-num-seqs", "1"]
    with beside_vllm(narrow, options, tmp_path_factory.mktemp("data"), **STORES) as clients:
        yield clients


def stripped(value: Any) -> Any:
    """Return a JSON value without what differs between any two answers."""
    if isinstance(value, dict):
        return {key: stripped(entry) for key, entry in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [stripped(entry) for entry in value]
    # A tenant's requests have a salt, too.
    return re.sub(r"<dict of \d+ items>", "<dict>", value) if isinstance(value, str) else value


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    response = client.post(
        path if path.startswith("/") else f"/v1/{path}", json={"model": MODEL, "temperature": 0} | body
    )
    kind = response.headers["content-type"].split(";")[0]
    if kind != "text/event-stream":
        return response.status_code, kind, stripped(response.json())
    if response.text.startswith("event: "):
        return response.status_code, kind, typed_events(response.text)
    frames = [frame.removeprefix("data: ") for frame in response.text.split("\n\n") if frame]
    events = [frame if frame == "[DONE]" else stripped(json.loads(frame)) for frame in frames]
    return response.status_code, kind, joined(events)


def typed_events(text: str) -> list[Any]:
    """Return the events of a stream of responses or messages, with neighbouring pieces of text as one."""
    found: list[Any] = []
    for frame in text.strip().split("\n\n"):
        name, _, data = frame.removeprefix("event: ").partition("\ndata: ")
        event = stripped(json.loads(data))
        if name == "response.completed" and event["response"]["status"] == "incomplete":
            name = event["type"] = "response.incomplete"  # vLLM's stream says that a cut one is complete
        if found and name.endswith("delta") and found[-1][0] == name:
            event = with_text(event, text_of(found.pop()[1]) + text_of(event))
        found.append((name, event))
    return found


def text_of(event: Any) -> str:
    delta = event["delta"]
    return str(delta if isinstance(delta, str) else delta["text"])


def with_text(event: Any, text: str) -> Any:
    return {**event, "delta": text if isinstance(event["delta"], str) else {**event["delta"], "text": text}}


def joined(events: list[Any]) -> list[Any]:
    """Join neighbouring events that carry one choice's text.

    Tokens that were ready at once share an event, so a busy machine decides how many events a text takes.
    """
    found: list[Any] = []
    for event in events:
        if found and goes_on(found[-1]) and has_choice(event):
            before, after = (entry["choices"][0] for entry in (found.pop(), event))
            if "delta" in after:
                after["delta"]["content"] = before["delta"]["content"] + after["delta"].get("content", "")
            else:
                after["text"] = before["text"] + after["text"]
        found.append(event)
    return found


def has_choice(event: Any) -> bool:
    """Return whether an event is a piece of a choice: neither the usage nor the end of the stream."""
    return event != "[DONE]" and bool(event["choices"])


def goes_on(event: Any) -> bool:
    """Return whether an event is text after which more follows: neither the role nor the last piece."""
    if not has_choice(event):
        return False
    choice = event["choices"][0]
    return choice["finish_reason"] is None and "role" not in choice.get("delta", {})


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_equal(servers: list[httpx.Client], name: str) -> None:
    ours, theirs = (answer(client, *REQUESTS[name]) for client in servers)
    assert ours == theirs


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_vllm_s_status_and_this_server_s_form(servers: list[httpx.Client], name: str) -> None:
    (status, kind, ours), (theirs_status, theirs_kind, theirs) = (
        answer(client, *REFUSED[name]) for client in servers
    )
    assert (status, kind) == (theirs_status, theirs_kind)
    assert status == theirs["error"]["code"]
    assert set(ours["error"]) == {"message", "type", "param", "code"}
    assert isinstance(ours["error"]["code"], str)
    assert ours["error"]["param"] in REFUSED[name][1].keys() | {"messages"}


@pytest.mark.parametrize("name", REFUSED_BY_HANDLERS)
def test_refusals_of_handlers_are_equal(servers: list[httpx.Client], name: str) -> None:
    ours, theirs = (answer(client, *REFUSED_BY_HANDLERS[name]) for client in servers)
    assert ours == theirs
    assert ours[0] >= 400


@pytest.mark.parametrize("place", [0, 2])
def test_a_wrong_item_of_a_response_is_named(servers: list[httpx.Client], place: int) -> None:
    items: list[Any] = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    items.insert(place, {"type": "nothing"})
    (status, _, ours), (theirs, _, _) = (answer(client, "responses", {"input": items}) for client in servers)
    assert status == theirs == 400
    assert ours["error"]["param"] == f"input.{place}"


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load"])
def test_probes_are_equal(servers: list[httpx.Client], path: str) -> None:
    ours, theirs = (client.get(path) for client in servers)
    assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)


def test_an_operator_is_answered_alike(servers: list[httpx.Client]) -> None:
    for request in OPERATING:
        ours, theirs = (client.request(*request.split()) for client in servers)
        assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content), request
    ours, theirs = (client.get("/server_info?config_format=json") for client in servers)
    assert ours.json().keys() == theirs.json().keys()
    assert ours.json()["vllm_config"].keys() == theirs.json()["vllm_config"].keys()


@pytest.mark.parametrize("in_background", [False, True])
def test_stored_responses_are_equal(servers: list[httpx.Client], *, in_background: bool) -> None:
    found = []
    for client in servers:
        body = {"model": MODEL, "input": "Name a colour.", "max_output_tokens": 6, "temperature": 0}
        given = client.post("/v1/responses", json=body | {"background": in_background}).json()
        path = f"/v1/responses/{given['id']}"

        def ended(client: httpx.Client = client, path: str = path) -> dict[str, Any] | None:
            stored: dict[str, Any] = client.get(path).json()
            return None if stored["status"] in {"queued", "in_progress"} else stored

        stored = wait_for(ended)
        cancelled = client.post(f"{path}/cancel")
        found.append([stripped(given), stripped(stored), cancelled.status_code])
    assert found[0] == found[1]


def test_responses_that_are_not_stored_are_missing_on_both(servers: list[httpx.Client]) -> None:
    for method, path in (("GET", "/v1/responses/resp_none"), ("POST", "/v1/responses/resp_none/cancel")):
        ours, theirs = (client.request(method, path) for client in servers)
        assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content), path


def test_what_a_model_of_this_kind_has_not_is_missing_on_both(servers: list[httpx.Client]) -> None:
    for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank"):
        ours, theirs = (client.post(path, json={"model": MODEL, "input": "x"}) for client in servers)
        assert ours.status_code == theirs.status_code == 404, path


def test_models_are_equal(servers: list[httpx.Client]) -> None:
    ours, theirs = (client.get("/v1/models").json() for client in servers)
    for body in (ours, theirs):
        for model in body["data"]:
            model.pop("created")
            model.pop("permission")
    for model in theirs["data"]:
        model["root"] = Path(model["root"]).name  # ours tells nobody its folders
    assert ours == theirs
