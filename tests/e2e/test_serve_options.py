"""Options of ``vllm serve`` that vLLM's handlers act upon: one server has them all, one other values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped] # it has no types

from tests.e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

PAGE = "https://page.example"
TEMPLATE = (
    "{{ greeting }}{% for m in messages %}<{{ m['role'] }}|{{ m['content'] is string }}>{% endfor %}"
    "{% if tools %}" + "with tools " * 20 + "{% endif %}{% if reasoning_effort == 'low' %}"
    "{{ 'think less ' * 20 }}{% endif %}assistant:"
)
MESSAGES = [{"role": "user", "content": "Name a colour."}]
TOOL = {
    "type": "function",
    "function": {"name": "paint", "parameters": {"type": "object", "properties": {"c": {"type": "string"}}}},
}
CALL = '<tool_call>{"name": "paint", "arguments": {"c": "red"}}</tool_call>'
THOUGHTS = "Here is my thought process: red is loud. Here is my response: blue"
ON = [
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--response-role", "narrator"),
    *("--reasoning-parser", "granite", "--structured-outputs-config.enable_in_reasoning", "true"),
    *("--enable-force-include-usage", "--enable-prompt-tokens-details", "--enable-per-request-metrics"),
    *("--fingerprint-mode", "custom", "--fingerprint-value", "mine", "--return-tokens-as-token-ids"),
    *("--chat-template-content-format", "openai", "--default-chat-template-kwargs", '{"greeting": "Hello."}'),
    *("--exclude-tools-when-tool-choice-none", "--trust-request-chat-template", "--trust-request-mm-kwargs"),
    *("--enable-tokenizer-info-endpoint", "--enable-server-load-tracking", "--enable-request-id-headers"),
    *("--enable-log-requests", "--enable-log-outputs", "--log-level", "INFO", "--log-error-stack"),
    *("--tool-strict-level", "parameter", "--max-log-len", "3"),
    *("--anthropic-disabled-thinking-effort", "none"),
    *("--allowed-origins", json.dumps([PAGE]), "--middleware", "tests.integration.test_listening.note"),
]
OFF = [
    *("--enable-auto-tool-choice", "--tool-call-parser", "calls_everything"),
    *("--tool-parser-plugin", "tests/e2e/own_tool_parser.py", "--fingerprint-mode", "none"),
    *("--enable-log-requests", "--enable-log-outputs", "--log-level", "INFO", "--no-enable-log-deltas"),
    *("--chat-template", TEMPLATE, "--root-path", "/behind/proxy"),
]
GENERATED = "Generated response"
SHARED = ["--max-model-len", "512", "--dtype", "float32"]


@pytest.fixture(scope="module", autouse=True)
def strict_answers() -> None:
    """Take the role that an option gives to answers, which no client's types have."""


class Client(httpx.Client):
    def __init__(self, server: Server, **headers: str) -> None:
        super().__init__(base_url=server.base_url, timeout=120, headers=headers)
        self.server = server

    def chat(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/chat/completions", json=chat_body(**body))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def prompt(self, **body: Any) -> str:
        tokens = self.post("/tokenize", json={"messages": MESSAGES, **body}).json()["tokens"]
        text: str = self.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        return text


def chat_body(**body: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, **body}


@pytest.fixture(scope="module")
def on(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server with all options, some of them in a file."""
    folder = tmp_path_factory.mktemp("options")
    (folder / "template.jinja").write_text(TEMPLATE)
    file = folder / "options.yaml"
    options = {
        "model": str(bundled),
        "served-model-name": ["first", "second"],
        "api-key": ["of the file"],
        "chat-template": str(folder / "template.jinja"),
        "sse-keep-alive-interval": 1,
        "max-model-len": 64,  # the command line takes precedence
    }
    file.write_text(yaml.safe_dump(options))
    with (
        Server(arguments=["--config", str(file), *SHARED, *ON]) as server,
        Client(server, authorization="Bearer of the file") as client,
    ):
        yield client


@pytest.fixture(scope="module")
def off(bundled: Path) -> Iterator[Client]:
    """A server with other values, or none."""
    arguments, environment = (
        ["--model", str(bundled), *SHARED, *OFF],
        {"NNSIGHT_ENGINE_INLINE_TENSOR_BYTES": "0"},
    )
    with Server(arguments=arguments, environment=environment) as server, Client(server) as client:
        yield client


def test_a_file_of_options_names_the_model_its_names_and_a_key(on: Client) -> None:
    names = [one["id"] for one in on.get("/v1/models").json()["data"]]
    assert names == ["first", "second"]
    for name in names:
        assert on.chat(model=name)["model"] == "first"  # as of vLLM
    refused = on.post("/v1/chat/completions", json=chat_body(), headers={"authorization": "Bearer x"})
    assert refused.status_code == 401
    assert on.get("/v1/capabilities").json()["sizes"]["max_model_len"] == 512


def test_the_chat_template_its_defaults_and_the_form_of_contents(on: Client, off: Client) -> None:
    assert on.prompt() == "Hello.<user|False>assistant:"
    assert off.prompt() == "<user|True>assistant:"
    assert on.prompt(chat_template_kwargs={"greeting": "Oh."}) == "Oh.<user|False>assistant:"


def test_a_request_may_bring_its_template_only_if_that_is_trusted(on: Client, off: Client) -> None:
    template = {"chat_template": "mine"}
    assert on.prompt(**template) == "mine"
    assert off.post("/v1/chat/completions", json=chat_body(**template)).status_code == 400


def test_arguments_of_processors_are_taken_only_if_they_are_trusted(on: Client, off: Client) -> None:
    body = chat_body(mm_processor_kwargs={"size": 1})
    assert on.post("/v1/chat/completions", json=body).status_code == 200
    refused = off.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "--trust-request-mm-kwargs" in refused.text


def test_a_call_is_found_by_the_chosen_parser(on: Client) -> None:
    found = on.chat(tools=[TOOL], structured_outputs={"choice": [CALL]}, max_tokens=40)["choices"][0]
    assert found["finish_reason"] == "tool_calls"
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert json.loads(call["function"]["arguments"]).keys() == {"c"}


def test_a_plugin_brings_a_parser(off: Client) -> None:
    (call,) = off.chat(tools=[TOOL])["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["text"]


def test_tools_are_left_out_of_the_prompt_if_none_may_be_called(on: Client, off: Client) -> None:
    for client, differs in ((on, False), (off, True)):
        counts = [
            client.chat(**tools)["usage"]["prompt_tokens"]
            for tools in ({}, {"tools": [TOOL], "tool_choice": "none"})
        ]
        assert (counts[1] > counts[0] + 20) is differs


def test_the_arguments_of_a_call_follow_its_schema_at_the_strictest_level(on: Client, off: Client) -> None:
    wrong = {"type": "object", "properties": {"c": {"type": "nothing"}}}
    body = chat_body(tools=[{"type": "function", "function": {"name": "paint", "parameters": wrong}}])
    statuses = [client.post("/v1/chat/completions", json=body).status_code for client in (on, off)]
    assert statuses == [400, 200]


def test_thoughts_are_told_apart_by_the_chosen_parser(on: Client) -> None:
    found = on.chat(structured_outputs={"choice": [THOUGHTS]}, max_tokens=40)["choices"][0]["message"]
    assert found["reasoning"].strip() == "red is loud."
    assert found["content"].strip() == "blue"


def test_answers_have_the_chosen_role_fingerprint_and_form_of_tokens(on: Client, off: Client) -> None:
    found, plain = (client.chat(logprobs=True) for client in (on, off))
    (choice,), (other,) = found["choices"], plain["choices"]
    assert (choice["message"]["role"], other["message"]["role"]) == ("narrator", "assistant")
    assert (found["system_fingerprint"], plain["system_fingerprint"]) == ("mine", None)
    assert choice["logprobs"]["content"][0]["token"].startswith("token_id:")
    assert not other["logprobs"]["content"][0]["token"].startswith("token_id:")


def test_usage_is_told_with_cached_tokens_and_times(on: Client, off: Client) -> None:
    long = [{"role": "user", "content": "x"}] * 60
    for client, is_told in ((on, True), (off, False)):
        streamed = client.post("/v1/chat/completions", json=chat_body(messages=long, stream=True)).text
        assert ('"usage":{' in streamed.replace(" ", "")) is is_told
        again = client.chat(messages=long)
        assert bool(again["usage"].get("prompt_tokens_details")) is is_told
        assert bool(again.get("metrics")) is is_told
    assert on.chat(messages=long)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_load_counts_what_is_under_way(on: Client, off: Client) -> None:
    for client, load in ((on, 1), (off, 0)):
        body = chat_body(stream=True, max_tokens=200, ignore_eos=True)
        assert client.get("/load").json() == {"server_load": 0}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith(("data: ", ":"))
            assert client.get("/load").json() == {"server_load": load}
            assert list(lines)[-2] == "data: [DONE]"
        assert client.get("/load").json() == {"server_load": 0}


def test_the_tokenizer_is_described_if_that_is_enabled(on: Client, off: Client) -> None:
    assert on.get("/tokenizer_info").json()["tokenizer_class"]
    assert off.get("/tokenizer_info").status_code == 404


def test_messages_without_thinking_have_the_chosen_effort(on: Client, off: Client) -> None:
    body = {"model": "first", "messages": MESSAGES, "max_tokens": 1, "thinking": {"type": "disabled"}}
    counts = []
    for client in (on, off):
        name = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post("/v1/messages", json={**body, "model": name})
        assert answer.status_code == 200, answer.text
        counts.append(answer.json()["usage"]["input_tokens"])
    assert counts[0] + 20 < counts[1]  # where vLLM sees that the template does not know `none`


def test_requests_and_answers_are_logged_without_their_content(on: Client, off: Client) -> None:
    for client, has_deltas in ((on, True), (off, False)):
        secret = [{"role": "user", "content": "swordfish swordfish"}]
        answer = client.chat(messages=secret)
        body = chat_body(messages=secret, stream=True, max_tokens=40, ignore_eos=True)
        before = client.server.whole_output().count(GENERATED)
        client.post("/v1/chat/completions", json=body)
        written = client.server.whole_output()
        assert (written.count(GENERATED) > before + 2) is has_deltas
        assert f"Received request {answer['id']}" in written
        assert f"{GENERATED} {answer['id']}" in written
        assert "swordfish" not in written


def test_links_to_results_have_the_prefix_of_the_server(off: Client) -> None:
    capture = {"op": "capture", "at": "layers.1.output", "name": "c"}
    (choice,) = off.chat(interventions=[capture])["choices"]
    (point,) = choice["interventions"]["results"]["c"]["points"].values()
    assert point["url"].startswith("/behind/proxy/v1/results/")
    assert off.get(point["url"]).status_code == 200


def test_errors_are_logged_where_they_were_raised_if_that_is_enabled(on: Client, off: Client) -> None:
    for client, is_logged in ((on, True), (off, False)):
        assert client.post("/v1/messages", json={"model": "first"}).status_code == 400
        assert ("RequestValidationError caught" in client.server.whole_output()) is is_logged


def test_the_command_line_chooses_origins_middleware_and_ids(on: Client) -> None:
    answer = on.get("/v1/models", headers={"origin": PAGE, "x-request-id": "mine"})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["x-noted"] == "/v1/models"
    assert answer.headers["x-request-id"] == "mine"
