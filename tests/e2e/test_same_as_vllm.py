"""A request without interventions is answered as by vLLM's own server, and refused with its status."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live import MODEL
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "Name a colour."}]
TOOL = {
    "type": "function",
    "function": {"name": "paint", "parameters": {"type": "object", "properties": {"c": {"type": "string"}}}},
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "colour",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
}

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

VOLATILE = {"id", "created", "system_fingerprint"}


@pytest.fixture(scope="module")
def servers(bundled: Path) -> Iterator[list[httpx.Client]]:
    """Serve the bundled model twice: by us, and by vLLM itself."""
    options = ["--served-model-name", MODEL, "--max-model-len", "512", "--enforce-eager"]
    options += ["--dtype", "float32"]  # which ours chooses by itself on some processors
    # One sequence at a time: which prompts share a step depends on when they arrive, and moves last digits.
    options += ["--max-num-seqs", "1"]
    vllm = Server(
        command=["-m", "vllm.entrypoints.openai.api_server"],
        ready_path="/health",
        arguments=["--model", str(bundled), *options],
        environment={"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        both = list(pool.map(stack.enter_context, [Server(str(bundled), arguments=options), vllm]))
        yield [stack.enter_context(httpx.Client(base_url=server.base_url, timeout=120)) for server in both]


def stripped(value: Any) -> Any:
    """Return a JSON value without what differs between any two answers."""
    if isinstance(value, dict):
        return {key: stripped(entry) for key, entry in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [stripped(entry) for entry in value]
    return value


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    """Return status, content type and content of an answer."""
    response = client.post(f"/v1/{path}", json={"model": MODEL, "temperature": 0} | body)
    kind = response.headers["content-type"].split(";")[0]
    if kind != "text/event-stream":
        return response.status_code, kind, stripped(response.json())
    frames = [frame.removeprefix("data: ") for frame in response.text.split("\n\n") if frame]
    events = [frame if frame == "[DONE]" else stripped(json.loads(frame)) for frame in frames]
    return response.status_code, kind, joined(events)


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


def test_models_are_equal(servers: list[httpx.Client]) -> None:
    ours, theirs = (client.get("/v1/models").json() for client in servers)
    for body in (ours, theirs):
        for model in body["data"]:
            model.pop("created")
            model.pop("permission")
    assert ours == theirs
