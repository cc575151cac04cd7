"""A single hostile request does not delay other clients: grammars, on a real server with keys."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.keyed import KeyedServer
from tests.liveness import Bystanders
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Say something."}]
COSTLY = "(" + "|".join(f"(.*[{letter}-z]){{1,1000}}" for letter in "abcdefghijklmnopqrstuvwxy" * 3) + ")"
"""Within every bound on its text, and half a minute of work."""


def schema_of(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}


def tool_of(schema: dict[str, Any]) -> dict[str, Any]:
    # Else vLLM keeps an answer to the tool's name alone.
    return {"type": "function", "function": {"name": "answer", "parameters": schema, "strict": True}}


def ways_of(schema: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return every way for a schema to get into a request: the route, and the fields."""
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    forced = {"type": "function", "function": {"name": "answer"}}
    return {
        "json": (COMPLETIONS, {"structured_outputs": {"json": schema}}),
        "json_text": (COMPLETIONS, {"structured_outputs": {"json": json.dumps(schema)}}),
        "structural_tag": (COMPLETIONS, {"structured_outputs": {"structural_tag": json.dumps(tag)}}),
        "response_format": (CHAT, {"response_format": response_format}),
        "response_format_tag": (CHAT, {"response_format": tag}),
        "tools": (CHAT, {"tools": [tool_of(schema)], "tool_choice": forced}),
    }


class Hostile:
    """A tenant who sends what others must not notice."""

    def __init__(self, found: KeyedServer) -> None:
        self.server = found.server
        self.http = found.tenant("acme")

    def post(self, path: str, fields: dict[str, Any], **more: Any) -> httpx.Response:
        body = {"max_tokens": 12, "temperature": 0, **fields}
        body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "Say something: "}
        return self.http.post(path, json=body, **more)


@pytest.fixture(scope="module")
def hostile(keyed_server: KeyedServer) -> Hostile:
    found = Hostile(keyed_server)
    # The first grammar of a server starts what compiles them.
    assert found.post(COMPLETIONS, {"structured_outputs": {"choice": ["yes", "no"]}}).status_code == 200
    return found


@pytest.fixture(scope="module")
def bystanders(keyed_server: KeyedServer, hostile: Hostile) -> Bystanders:
    del hostile  # whose first grammar would disturb
    return Bystanders(keyed_server.server.port, keyed_server.keys["rival"])


def text_of(response: httpx.Response) -> str:
    choice = response.json()["choices"][0]
    if "text" in choice:
        return str(choice["text"])
    message = choice["message"]
    calls = message.get("tool_calls")
    return str(calls[0]["function"]["arguments"] if calls else message["content"])


@pytest.mark.parametrize("way", ways_of({}))
def test_grammars_are_kept_to_in_every_field(hostile: Hostile, way: str) -> None:
    path, fields = ways_of(schema_of("[xyz]{2,3}"))[way]
    response = hostile.post(path, {**fields, "max_tokens": 100})
    assert response.status_code == 200, response.text
    found = re.search(r'"a"\s*:\s*"(\w*)"', text_of(response))
    assert found is not None, response.text
    value = found[1]
    assert set(value) <= set("xyz")
    assert 2 <= len(value) <= 3


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"regex": "(ab){2}"}, "abab"),
        ({"choice": ["yes please", "yes please"]}, "yes please"),
        ({"grammar": 'root ::= "fixed"'}, "fixed"),
    ],
)
def test_other_grammars_are_kept_to(hostile: Hostile, given: dict[str, Any], right: str) -> None:
    response = hostile.post(COMPLETIONS, {"structured_outputs": given})
    assert response.status_code == 200, response.text
    assert text_of(response) == right


def test_a_huge_regex_is_refused_without_delay_to_others(hostile: Hostile, bystanders: Bystanders) -> None:
    regex = "|".join("a" * i + "b" for i in range(6000))
    assert len(regex) > 18_000_000

    def send(_: int) -> None:
        response = hostile.post(COMPLETIONS, {"structured_outputs": {"regex": regex}})
        assert response.status_code in {400, 413}, response.text

    bystanders.unharmed(send)


@pytest.mark.parametrize("way", ways_of({}))
def test_a_costly_grammar_is_ended_without_delay_to_others(
    hostile: Hostile, bystanders: Bystanders, way: str
) -> None:
    def send(number: int) -> None:
        # Another one each time, or the verdict on the first would be remembered.
        path, fields = ways_of(schema_of(f"{way}{number}{COSTLY}"))[way]
        response = hostile.post(path, fields)
        assert response.status_code == 400, response.text
        assert "bytes to compile" in response.json()["error"]["message"]

    bystanders.unharmed(send)
    forking = forking_process(hostile)
    forking.suspend()
    try:
        send(0)  # what is remembered needs no process
    finally:
        forking.resume()


def test_a_client_that_disconnects_ends_the_compilation(hostile: Hostile) -> None:
    wait_for(lambda: compiling(hostile) == 0)
    fields = {"structured_outputs": {"json": schema_of(f"left{COSTLY}")}}
    with pytest.raises(httpx.ReadTimeout):
        hostile.post(COMPLETIONS, fields, timeout=1)
    wait_for(lambda: compiling(hostile) == 0)
    # It was not compiled to its end, or that would be known.
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(hostile.post, COMPLETIONS, fields)
        wait_for(lambda: compiling(hostile) == 1)
        assert again.result().status_code == 400


def forking_process(hostile: Hostile) -> psutil.Process:
    """Return the process that forks one for each grammar."""
    (forking,) = (
        one
        for one in psutil.Process(hostile.server.process.pid).children()
        if "nnsight_engine.vllm_backend.grammar_process" in one.cmdline()
    )
    return forking


def compiling(hostile: Hostile) -> int:
    return len(forking_process(hostile).children())


def test_no_grammar_is_in_the_log(hostile: Hostile) -> None:
    for stream in (False, True):
        given = {"regex": "(secret-of-a-client"}
        response = hostile.post(COMPLETIONS, {"structured_outputs": given, "stream": stream})
        assert response.status_code == 400, response.text
    assert "secret-of-a-client" not in hostile.server.whole_output()
