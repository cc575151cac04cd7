"""Where-clauses name the reasoning, the content and the tool calls of an answer, as its parsers find them."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from vllm.tool_parsers import ToolParserManager

from app.engine.answer_parsers import TOOL_MARKERS, find_markers
from tests.e2e.answers import tensor_of
from tests.e2e.live import Live, live_server
from tests.families.checkpoints import CHAT_TEMPLATE, build_tokenizer, write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]

MARKERS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CALL: Final = {"name": "look", "arguments": {"at": "dogs"}}
REASONING, CONTENT, LATER = "I think cats", " I love dogs", " of Rome"
ANSWER: Final = f"<think>{REASONING}</think>{CONTENT}<tool_call>{json.dumps(CALL)}</tool_call>{LATER}"
SCHEMA: Final = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS: Final = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
MESSAGES: Final = [{"role": "user", "content": "hate cats"}]
FOUND_BY_TEXT: Final = {
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v32", "deepseek_v4", "deepseek_v41",
    "gigachat3", "granite", "hf", "hunyuan_a13b", "hy_v4", "inkling", "internlm", "k2_horizon",
    "kimi_k3", "lfm2", "llama3_json", "llama4_json", "llama4_pythonic", "mimo", "minicpm5",
    "minimax_m3", "muse_glimmer", "olmo3", "openai", "phi4_mini_json", "plamo3", "pythonic",
    "qwen3_coder", "qwen3_xml", "seed_oss", "step3", "step3p5", "xlam",
}  # fmt: skip
"""vLLM's parsers of tool calls that have no markers here."""
SCOPES: Final = ("reasoning", "content", "tool_calls")


def write_with_markers(folder: Path) -> Path:
    write_checkpoint("llama", folder)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(list(MARKERS))
    tokenizer.chat_template = CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_markers(tmp_path_factory.mktemp("markers"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    options = (
        *("--reasoning-parser", "deepseek_r1", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
        *("--dtype", "float32", "--max-model-len", "256", "--block-size", "32"),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    )
    async with live_server(folder, tmp_path_factory.mktemp("results"), *options) as live:
        yield live


class Forced:
    """A request whose answer is given: at each of its positions, a patch of the logits decides the token.

    Attributes:
        positions: By scope, the positions from which its tokens are sampled.
        everywhere: All positions that are computed.
    """

    def __init__(self, prompt_len: int, tokenizer: PreTrainedTokenizerFast, answer: str = ANSWER) -> None:
        ids = tokenizer.encode(answer, add_special_tokens=False)
        values = np.zeros((len(ids), len(tokenizer)), np.float32)
        values[np.arange(len(ids)), ids] = 100.0
        places = list(range(prompt_len - 1, prompt_len - 1 + len(ids)))
        data = base64.b64encode(values.tobytes()).decode()
        tensor = {"dtype": "float32", "shape": list(values.shape), "data": data}
        self.patch = {"op": "patch", "at": "logits", "values": tensor, "where": {"positions": places}}
        self.max_tokens = len(ids)
        self.everywhere = list(range(places[-1] + 1))
        self.positions: dict[str, list[int]] = {scope: [] for scope in SCOPES}
        part = "reasoning"  # which the parser takes for granted
        for place, (before, _) in zip(places, pairwise([None, *ids]), strict=True):
            marker = None if before is None else tokenizer.convert_ids_to_tokens(before)
            part = dict(zip(MARKERS, ("reasoning", "content", "tool_calls", "content"), strict=True)).get(
                str(marker), part
            )
            self.positions[part].append(place)


async def prompt_len(live: Live) -> int:
    response = await live.post("/tokenize", messages=MESSAGES, tools=TOOLS)
    length: int = response.json()["count"]
    return length


async def asked(live: Live, forced: Forced, *operations: dict[str, Any], **body: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": forced.max_tokens} | body
    response = await live.post(
        "/v1/chat/completions", interventions=[forced.patch, *operations], ignore_eos=True, **body
    )
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def capture(name: str, where: dict[str, Any], at: str = "layers.1.output") -> dict[str, Any]:
    return {"op": "capture", "at": at, "name": name, "where": where}


async def test_each_part_is_what_the_parsers_make_of_the_answer(
    live: Live, tokenizer: PreTrainedTokenizerFast
) -> None:
    forced = Forced(await prompt_len(live), tokenizer)
    wheres: dict[str, dict[str, Any]] = {
        **{scope: {"scope": scope} for scope in SCOPES},
        "but calls": {"exclude": {"scope": "tool_calls"}},
        "late": {"scope": "content", "range": [forced.positions["tool_calls"][0], None]},
    }
    choice = await asked(live, forced, *(capture(name, where) for name, where in wheres.items()))
    message = choice["message"]
    assert message["reasoning"] == REASONING
    assert message["content"] == CONTENT
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == tuple(CALL.values())
    found = {name: one["positions"] for name, one in choice["interventions"]["results"].items()}
    in_calls = set(forced.positions["tool_calls"])
    assert found == forced.positions | {
        "but calls": [position for position in forced.everywhere if position not in in_calls],
        "late": [place for place in forced.positions["content"] if place > max(in_calls)],
    }
    assert all(found.values())


@pytest.mark.parametrize("scope", SCOPES)
async def test_steering_leaves_the_other_parts_alone(
    live: Live, tokenizer: PreTrainedTokenizerFast, scope: str
) -> None:
    forced = Forced(await prompt_len(live), tokenizer)
    rows = {}
    for number in (0, 1):
        steer = {"op": "steer", "at": "layers.1.output", "vector": [1.0] * 128, "where": {"scope": scope}}
        choice = await asked(live, forced, *[steer][:number], capture("seen", {}))
        result = choice["interventions"]["results"]["seen"]["points"]["layers.1.output"]
        rows[number] = tensor_of(result)
    changed = np.flatnonzero(np.abs(rows[1] - rows[0]).max(axis=1) > 0.5).tolist()
    assert changed == forced.positions[scope]
    np.testing.assert_allclose(rows[1][changed] - rows[0][changed], 1.0, atol=1e-3)


async def test_a_budget_ends_the_reasoning(live: Live, tokenizer: PreTrainedTokenizerFast) -> None:
    forced = Forced(await prompt_len(live), tokenizer)
    message = (await asked(live, forced, thinking_token_budget=2))["message"]
    ids = tokenizer.encode(REASONING, add_special_tokens=False)
    assert len(ids) > 2
    assert message["reasoning"] == tokenizer.decode(ids[:2])


async def test_streams_have_the_same_parts(live: Live, tokenizer: PreTrainedTokenizerFast) -> None:
    forced = Forced(await prompt_len(live), tokenizer)
    probes = [
        {
            "op": "probe",
            "at": "layers.1.output",
            "weights": [1.0] * 128,
            "name": scope,
            "where": {"scope": scope},
        }
        for scope in SCOPES
    ]
    events = await live.events(
        "/v1/chat/completions",
        messages=MESSAGES,
        tools=TOOLS,
        max_tokens=forced.max_tokens,
        interventions=[forced.patch, *probes],
        ignore_eos=True,
    )
    found: dict[str, list[int]] = {scope: [] for scope in SCOPES}
    for event in events:
        for choice in event["choices"]:
            for name, one in ((choice.get("interventions") or {}).get("results") or {}).items():
                found[name] += one["positions"]
    assert found == forced.positions


async def test_a_call_that_is_cut_is_the_same_whole_and_streamed(
    live: Live, tokenizer: PreTrainedTokenizerFast
) -> None:
    before = ANSWER.partition("<tool_call>")[0]
    for part in ("", '{"name": "lo', json.dumps(CALL)[:-4], json.dumps(CALL)):
        forced = Forced(await prompt_len(live), tokenizer, f"{before}<tool_call>{part}")
        whole = await asked(live, forced)
        events = await live.events(
            "/v1/chat/completions",
            messages=MESSAGES,
            tools=TOOLS,
            max_tokens=forced.max_tokens,
            interventions=[forced.patch],
            ignore_eos=True,
        )
        pieces = [choice for event in events for choice in event["choices"]]
        text = "".join(one["delta"].get("content") or "" for one in pieces)
        calls = [call for one in pieces for call in one["delta"].get("tool_calls") or ()]
        streamed = [
            "".join(one["function"].get(name) or "" for one in calls) for name in ("name", "arguments")
        ]
        found = whole["message"].get("tool_calls") or []
        assert whole["message"]["content"] == text == CONTENT
        assert whole["finish_reason"] == pieces[-1]["finish_reason"] == "length"
        assert bool(found) == bool(calls) == ("look" in part)
        for one in found:
            assert [one["function"]["name"], one["function"]["arguments"]] == streamed


async def test_a_prompt_that_ends_the_reasoning_begins_with_content(
    live: Live, tokenizer: PreTrainedTokenizerFast
) -> None:
    places = {}
    for text in ("I love dogs", "I love</think>", "</think><|endoftext|>I love", "<tool_call>{"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        response = await live.post(
            prompt=ids, max_tokens=2, interventions=[capture(scope, {"scope": scope}) for scope in SCOPES]
        )
        results = response.json()["choices"][0]["interventions"]["results"]
        (places[text],) = [name for name, one in results.items() if one["positions"][:1] == [len(ids) - 1]]
    assert list(places.values()) == ["reasoning", "content", "reasoning", "tool_calls"]


async def test_a_grammar_holds_while_content_is_steered(live: Live) -> None:
    schema = SCHEMA | {"properties": {"at": {"enum": ["dogs", "cats"]}}, "additionalProperties": False}
    steer = {"op": "steer", "at": "layers.1.output", "vector": [4.0] * 128, "where": {"scope": "content"}}
    response = await live.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hate cats</think>"}],  # grammars begin behind the reasoning
        max_tokens=60,
        interventions=[steer, *(capture(scope, {"scope": scope}) for scope in SCOPES)],
        response_format={"type": "json_schema", "json_schema": {"name": "at", "schema": schema}},
    )
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    # Not streamed, vLLM's answer does not take into account that the prompt has ended the reasoning.
    assert json.loads(choice["message"]["reasoning"])["at"] in {"dogs", "cats"}
    results = choice["interventions"]["results"]
    assert [bool(results[scope]["positions"]) for scope in SCOPES] == [False, True, False]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look"}}, {"type": "any"}, ["odd"]]
)
async def test_a_forced_call_has_no_markers_and_is_refused(live: Live, choice: Any) -> None:
    operations = [capture("seen", {"exclude": {"scope": "tool_calls"}})]
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    response = await live.post("/v1/chat/completions", interventions=operations, **body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_combination")
    assert error["param"] == "interventions.0.where.scope"


async def test_capabilities_name_the_scopes(live: Live) -> None:
    assert set((await live.http.get("/v1/capabilities")).json()["scopes"]) == set(SCOPES)


def test_each_parser_of_tool_calls_is_known(tokenizer: PreTrainedTokenizerFast) -> None:
    registered = set(ToolParserManager.lazy_parsers)
    assert set(TOOL_MARKERS) <= registered
    assert registered - set(TOOL_MARKERS) == FOUND_BY_TEXT
    for name in FOUND_BY_TEXT:
        markers = find_markers("", name, tokenizer)
        assert markers.scopes == []
        assert f"--tool-call-parser {name} finds this part by the text" in markers.missing["tool_calls"]
    without_tokens = find_markers("", "mistral", tokenizer)
    assert "[TOOL_CALLS], by which --tool-call-parser mistral" in without_tokens.missing["content"]
    assert find_markers("", "hermes", tokenizer).scopes == ["content", "tool_calls"]
    assert find_markers("deepseek_r1", "", tokenizer).scopes == ["content", "reasoning"]
    assert find_markers("deepseek_r1", "pythonic", tokenizer).scopes == ["reasoning"]
