"""The whole server on the real model: OpenAI's client, streams, files, errors, clients that go away."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import safetensors.numpy
from openai import AsyncOpenAI

from tests.e2e.answers import tensor_of
from tests.e2e.harness import random_vector
from tests.e2e.live import MODEL, Live
from tests.narrow_model import NEXT, PROMPT, WIDTH

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

STEER = {
    "op": "steer",
    "at": "layers.15.output",
    "vector": random_vector(0),
    "scale": 0.5,
    "mode": "norm_match",
}
PROBE = {"op": "probe", "at": "layers.15.output", "weights": random_vector(1), "name": "probe"}
LENS = {"op": "logit_lens", "layers": "all", "top_k": 3, "where": {"phase": "generated"}, "name": "lens"}
CAPTURE = {"op": "capture", "at": "layers.10.output", "dtype": "float32", "name": "resid"}


async def test_a_text_s_tokens_are_those_that_positions_count(live: Live) -> None:
    told = (await live.http.post("/v1/tokenize", json={"prompt": PROMPT})).json()["tokens"]
    assert "".join(token["text"] for token in told) == PROMPT
    capture = {"op": "capture", "at": "layers.0.output", "where": {"phase": "prompt"}, "name": "all"}
    answer = await live.http.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "interventions": [capture]}
    )
    results = answer.json()["choices"][0]["interventions"]["results"]
    assert results["all"]["positions"] == list(range(len(told)))


async def test_a_returned_token_can_be_sent_back(live: Live) -> None:
    prompt = "Paris \N{GRINNING FACE WITH SMILING EYES} \u0f0b\n\tcafe\u0301"
    told = (await live.http.post("/v1/tokenize", json={"prompt": prompt})).json()["tokens"]
    assert any("<0x" in token["text"] for token in told), "parts of a character are among them"
    ids = {token["text"]: token["id"] for token in told}
    lens = {"op": "logit_lens", "layers": [3], "top_k": 20, "targets": list(ids), "name": "lens"}
    body = {"prompt": prompt, "max_tokens": 1}
    answer = await live.http.post("/v1/completions", json=body | {"interventions": [lens]})
    places = answer.json()["choices"][0]["interventions"]["results"]["lens"]["layers"]["3"]
    assert {one["token"]: one["id"] for one in places[0]["targets"]} == ids
    said = {one["token"]: one["id"] for place in places for one in place["top"]}
    back = lens | {"top_k": 0, "targets": list(said)[:100]}
    answer = await live.http.post("/v1/completions", json=body | {"interventions": [back]})
    places = answer.json()["choices"][0]["interventions"]["results"]["lens"]["layers"]["3"]
    assert {one["token"]: one["id"] for one in places[0]["targets"]} == dict(list(said.items())[:100])
    for token in told:
        where = {"tokens": [token["text"]], "phase": "prompt"}
        capture = {"op": "capture", "at": "layers.0.output", "where": where, "name": "it"}
        answer = await live.http.post("/v1/completions", json=body | {"interventions": [capture]})
        found = answer.json()["choices"][0]["interventions"]["results"]["it"]["positions"]
        assert found == [at for at, other in enumerate(told) if other["id"] == token["id"]]


async def test_openais_client_passes_interventions_and_reads_results(live: Live) -> None:
    client = AsyncOpenAI(base_url=f"{live.http.base_url}/v1", api_key="unused")
    plain = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    steered = await client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        extra_body={"interventions": [STEER, CAPTURE]},
    )
    assert plain.choices[0].text.startswith(NEXT)
    assert steered.choices[0].text != plain.choices[0].text
    extra = steered.choices[0].model_extra
    assert extra is not None
    answer = extra["interventions"]
    positions = answer["results"]["resid"]["positions"]
    assert tensor_of(answer["results"]["resid"]["points"]["layers.10.output"]).shape == (
        len(positions),
        WIDTH,
    )
    assert [entry["op"] for entry in answer["applied"]] == ["steer", "capture"]
    assert answer["applied"][0]["positions"] == positions
    assert len(answer["provenance"]["fingerprint"]) == 64
    assert answer["provenance"]["tier"] == "tap"


async def test_chat_takes_interventions_too(live: Live) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    plain = (await live.post("/v1/chat/completions", messages=messages)).json()
    body = (await live.post("/v1/chat/completions", messages=messages, interventions=[STEER, PROBE])).json()
    choice = body["choices"][0]
    assert choice["message"]["content"] != plain["choices"][0]["message"]["content"]
    num_fed = body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"] - 1
    assert choice["interventions"]["results"]["probe"]["positions"] == list(range(num_fed))


async def test_a_stream_carries_each_tokens_results_with_that_token(live: Live) -> None:
    interventions = [STEER, PROBE, LENS, {**CAPTURE, "reduce": "mean", "name": "mean"}]
    whole = (await live.post(prompt=PROMPT, interventions=interventions)).json()["choices"][0]
    events = await live.events(prompt=PROMPT, interventions=interventions, return_token_ids=True)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    parts = [event["choices"][0]["interventions"] for event in events]
    num_tokens = [len(event["choices"][0]["token_ids"]) for event in events]  # several, if we read slowly
    end = len(whole["interventions"]["results"]["probe"]["positions"]) - sum(num_tokens)
    for index, (part, num_new) in enumerate(zip(parts, num_tokens, strict=True)):
        # The first token comes with the whole prompt, each further one with the position it was sampled at.
        begin, end = (0 if index == 0 else end), end + num_new
        assert part["results"]["probe"]["positions"] == list(range(begin, end))
        assert ("lens" in part["results"]) == (index > 0 or num_new > 1)
        assert ("mean" in part["results"]) == (index == len(parts) - 1)
    streamed = [value for part in parts for value in part["results"]["probe"]["points"]["layers.15.output"]]
    assert streamed == whole["interventions"]["results"]["probe"]["points"]["layers.15.output"]
    assert parts[-1]["applied"] == whole["interventions"]["applied"]
    mean = tensor_of(parts[-1]["results"]["mean"]["points"]["layers.10.output"])
    np.testing.assert_allclose(
        mean, tensor_of(whole["interventions"]["results"]["mean"]["points"]["layers.10.output"]), rtol=1e-5
    )


async def test_several_prompts_and_choices_each_have_their_own_results(live: Live) -> None:
    prompts = [PROMPT, "Hello"]
    sampling = {"prompt": prompts, "n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 4}
    interventions = [PROBE, {"op": "capture", "at": "samples", "name": "ids"}]
    body = (await live.post(interventions=interventions, **sampling, return_token_ids=True)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for choice in body["choices"]:
        results = choice["interventions"]["results"]
        ids = tensor_of(results["ids"]["points"]["samples"])
        assert ids.tolist() == choice["token_ids"]
        num_prompt = len(choice["prompt_token_ids"] or []) or results["ids"]["positions"][0] + 1
        assert results["probe"]["positions"] == list(range(num_prompt + 3))
    events = await live.events(interventions=interventions, **sampling)
    seen: dict[int, list[int]] = {}
    for event in events:
        for choice in event["choices"]:
            probe = choice.get("interventions", {}).get("results", {}).get("probe", {"positions": []})
            seen.setdefault(choice["index"], []).extend(probe["positions"])
    for choice in body["choices"]:
        assert seen[choice["index"]] == choice["interventions"]["results"]["probe"]["positions"]


async def test_stop_strings_end_a_request_with_its_results(live: Live) -> None:
    plain = (await live.post(prompt=PROMPT, max_tokens=16)).json()["choices"][0]["text"]
    stop = plain.strip().split()[2]
    for stream in (False, True):
        body = {
            "prompt": PROMPT,
            "max_tokens": 16,
            "stop": [stop],
            "interventions": [PROBE, {**CAPTURE, "reduce": "last"}],
        }
        if stream:
            choice = (await live.events(**body))[-1]["choices"][0]
        else:
            choice = (await live.post(**body)).json()["choices"][0]
            assert choice["interventions"]["results"]["probe"]["positions"][-1] > 8
        assert choice["finish_reason"] == "stop"
        assert "resid" in choice["interventions"]["results"]
        assert choice["interventions"]["applied"][0]["positions"]
    assert set((await live.held()).values()) == {0}


@pytest.mark.parametrize("reduce", ["none", "last", "mean"])
async def test_a_capture_beyond_its_dtype_is_an_error_whole_streamed_and_in_files(
    live: Live, reduce: str
) -> None:
    far = {"op": "steer", "at": "layers.9.output", "vector": [0.0, 3e6] + [0.0] * (WIDTH - 2)}
    points = {"inline": "layers.10.output", "file": "layers.*.output"}
    prompt = PROMPT * 20
    for name, at in points.items():
        capture = {"op": "capture", "at": at, "name": name, "reduce": reduce}
        for dtype in ("float16", "bfloat16", "float32"):
            body = {"prompt": prompt, "max_tokens": 2, "interventions": [far, capture | {"dtype": dtype}]}
            whole = await live.post(**body)
            streamed = await live.post(**body, stream=True)
            told = streamed.text if streamed.status_code == 200 else ""
            if dtype != "float16":
                assert whole.status_code == 200, whole.text
                assert '"error"' not in told
                assert told.endswith("data: [DONE]\n\n")
                continue
            assert whole.status_code == 400
            events = [json.loads(line.removeprefix("data: ")) for line in told.split("\n\n")[:-2]]
            for answer in (whole.json(), events[-1] if told else streamed.json()):
                error = answer["error"]
                assert error["code"] == "not_finite"
                assert "bfloat16 or float32" in error["message"]
                assert name in error["message"]
    assert set((await live.held()).values()) == {0}


async def test_large_results_are_files_equal_to_what_was_captured(live: Live) -> None:
    prompt = "The history of the city begins with a small settlement by the river. " * 14
    points = ["layers.0.output", "layers.29.output"]
    big = {"op": "capture", "at": "layers.*.output", "dtype": "float32", "name": "big"}
    body = (await live.post(prompt=prompt, max_tokens=1, interventions=[big])).json()
    tensors = body["choices"][0]["interventions"]["results"]["big"]["points"]
    link = tensors[points[0]]
    assert link["format"] == "safetensors"
    response = await live.http.get(link["url"])
    stored = safetensors.numpy.load(response.content)
    small = {**big, "at": points, "where": {"positions": [0, 5]}}
    inline = (await live.post(prompt=prompt, max_tokens=1, interventions=[small])).json()
    expected = inline["choices"][0]["interventions"]["results"]["big"]["points"]
    for point in points:
        assert tensors[point]["shape"] == list(stored[tensors[point]["key"]].shape)
        np.testing.assert_array_equal(stored[tensors[point]["key"]][[0, 5]], tensor_of(expected[point]))
    assert (await live.http.get("/v1/results/unknown")).json()["error"]["code"] == "result_not_found"


async def test_beam_search_and_forged_plans_are_refused(live: Live) -> None:
    beam = await live.post(prompt=PROMPT, use_beam_search=True, n=2, interventions=[STEER])
    assert (beam.status_code, beam.json()["error"]["code"]) == (400, "unsupported_combination")
    for key in ("nnsight_engine", "nnsight_engine_trace", "nnsight_engine_sender"):
        forged = await live.post(prompt=PROMPT, vllm_xargs={key: "x"})
        assert (forged.status_code, forged.json()["error"]["code"]) == (400, "bad_request")
    assert (await live.post(prompt=PROMPT)).status_code == 200


async def test_a_capture_over_the_limit_fails_with_a_code_in_a_stream_too(live: Live) -> None:
    huge = {"op": "capture", "at": "logits", "dtype": "float32", "where": {"phase": "generated"}}
    lens = [{**huge, "name": f"c{i}"} for i in range(60)]
    failed = await live.post(prompt=PROMPT, max_tokens=64, ignore_eos=True, interventions=lens)
    assert failed.status_code == 400, failed.text[:500]
    assert failed.json()["error"]["code"] == "capture_too_large"
    events = await live.events(prompt=PROMPT, max_tokens=64, ignore_eos=True, interventions=lens)
    assert events[-1]["error"]["code"] == "capture_too_large"
    assert len(events) > 1
    assert set((await live.held()).values()) == {0}


async def test_clients_that_go_away_leave_nothing_behind(live: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 600, "ignore_eos": True, "interventions": [STEER, CAPTURE]}
    await asyncio.gather(*(live.leave_after(3, **body) for _ in range(4)))
    whole = asyncio.create_task(live.post(**body))
    await asyncio.sleep(0.5)
    whole.cancel()
    await asyncio.gather(whole, return_exceptions=True)
    assert set((await live.held()).values()) == {0}


async def test_capabilities_name_what_requests_may(live: Live) -> None:
    body = (await live.http.get("/v1/capabilities")).json()
    assert body["sizes"] == {
        "num_layers": 30,
        "hidden_size": WIDTH,
        "vocab_size": 49152,
        "max_model_len": 1024,
    }
    by_name = {point["name"]: point for point in body["points"]}
    assert by_name["layers.*.output"]["tier"] == "tap"
    assert by_name["layers.*.attn.q"]["shape"] == [4, 32]
    for name, point in by_name.items():
        if "capture" in point["operations"] and name != "samples":
            at = name.replace("*", "3")
            response = await live.post(
                prompt=PROMPT, max_tokens=1, interventions=[{"op": "capture", "at": at, "name": "c"}]
            )
            assert response.status_code == 200, (name, response.text)
