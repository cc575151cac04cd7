"""The operation ``trace``: code beside a request of the server, its results, its failures, its neighbours."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from typing_extensions import override

from nnsight_engine import save
from nnsight_engine.remote_backend.values.received_blocks import SAVED
from nnsight_engine.serialization import SentBlock, encode_trace
from nnsight_engine.tracing.tracer import Tracer
from tests.e2e.answers import tensor_of
from tests.e2e.live import MODEL, Live
from tests.narrow_model import NEXT, PROMPT, WIDTH
from tests.waiting import wait_for_async

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

HIDDEN = "hs = model.layers[5].output[-1].float().save()"


def op(code: str, **fields: Any) -> dict[str, Any]:
    return {"op": "trace", "code": code, "name": "t", **fields}


async def traced(live: Live, code: str, *, variables: dict[str, Any] | None = None, **body: Any) -> Any:
    body = {"prompt": PROMPT, "interventions": [op(code, variables=variables or {})], **body}
    response = await live.post(**body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def saves(choice: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = choice["interventions"]["results"]["t"]["saves"]
    return found


async def test_what_code_saves_is_what_a_capture_gives(live: Live) -> None:
    capture = {"op": "capture", "at": "layers.5.output", "dtype": "float32", "name": "c", "reduce": "last"}
    captured = (await live.post(prompt=PROMPT, max_tokens=1, interventions=[capture])).json()["choices"][0]
    choice = await traced(live, HIDDEN, max_tokens=1)
    expected = captured["interventions"]["results"]["c"]["points"]["layers.5.output"]
    np.testing.assert_allclose(tensor_of(saves(choice)["hs"]), tensor_of(expected), rtol=1e-2, atol=1e-2)
    assert choice["text"] == captured["text"]
    assert choice["interventions"]["results"]["t"]["type"] == "trace"
    assert choice["interventions"]["provenance"] == {"tier": "tap"}
    inside = await traced(live, "inside = model.layers[5].mlp.output[-1].float().save()", max_tokens=1)
    assert inside["interventions"]["provenance"] == {"tier": "eager"}


STEER = """
kept = save([])
for step in tracer.iter[:]:
    model.layers[15].output[:] += scale * torch.tensor(vector, dtype=torch.bfloat16)
    kept.append(model.samples.output.item())
print("steps", len(kept))
answer = tracer.result.save()
"""


async def test_code_writes_loops_prints_and_gets_variables(live: Live) -> None:
    vector = [0.0] * WIDTH
    vector[64] = 40.0
    plain = (await live.post(prompt=PROMPT)).json()["choices"][0]
    choice = await traced(live, STEER, variables={"scale": 1.0, "vector": vector}, return_token_ids=True)
    assert choice["text"] != plain["text"]
    assert saves(choice)["kept"] == choice["token_ids"]
    assert saves(choice)["answer"]["text"] == choice["text"]
    assert choice["interventions"]["results"]["t"]["printed"] == "steps 8\n"
    unscaled = await traced(live, STEER, variables={"scale": 0.0, "vector": vector})
    assert unscaled["text"] == plain["text"]
    steer = {"op": "steer", "at": "layers.15.output", "vector": vector}
    declared = (await live.post(prompt=PROMPT, interventions=[steer])).json()["choices"][0]
    assert declared["text"] == choice["text"]


async def test_what_a_cache_missed_is_among_the_warnings(live: Live) -> None:
    code = "h = model.layers[5].output[-1].float().save()\ntracer.cache(modules=[model.layers[2]])"
    result = (await traced(live, code, max_tokens=1))["interventions"]["results"]["t"]
    (said,) = result["warnings"]
    assert "model.model.layers.2.output, which had run before the cache was created" in said
    result = (await traced(live, HIDDEN, max_tokens=1))["interventions"]["results"]["t"]
    assert "warnings" not in result


async def test_tensors_go_in_and_chat_works_too(live: Live) -> None:
    data = base64.b64encode(np.arange(3, dtype=np.float32).tobytes()).decode()
    given = {"dtype": "float32", "shape": [3], "data": data, "encoding": "base64"}
    code = "twice = save({'a': [vector * 2], 'n': model.layers[0].output.shape[0]})"
    response = await live.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Hello"}],
        interventions=[op(code, variables={"vector": given})],
    )
    body = response.json()
    found = saves(body["choices"][0])["twice"]
    assert tensor_of(found["a"][0]).tolist() == [0, 2, 4]
    assert found["n"] == body["usage"]["prompt_tokens"]


WATCH = """
norms, marks = save([]), save({})
for step in tracer.iter[:]:
    norms.append(model.layers[10].output[-1].float().norm().item())
    marks = save({"step": step})
last = save("end")
"""


async def test_a_stream_tells_what_is_new_with_each_chunk_and_all_with_the_last(live: Live) -> None:
    whole = await traced(live, WATCH)
    events = await live.events(prompt=PROMPT, interventions=[op(WATCH)])
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    fields = [choice["interventions"] for choice in choices if "interventions" in choice]
    assert [field.get("provenance") for field in fields] == [*([None] * (len(fields) - 1)), {"tier": "tap"}]
    *parts, last = [field["results"]["t"] for field in fields]
    assert last["saves"] == saves(whole)
    told: list[float] = []
    for part in parts:
        told = [*part["saves"].get("norms", told), *part.get("grown", {}).get("norms", [])]
    assert told == last["saves"]["norms"][: len(told)]
    steps = [part["saves"]["marks"]["step"] for part in parts]
    assert steps
    assert steps == sorted(set(steps))  # a busy machine makes one event of several tokens


async def test_every_prompt_and_choice_has_its_own_variables(live: Live) -> None:
    code = "tokens = save([])\nfor _ in tracer.iter[:]:\n    tokens.append(model.samples.output.item())"
    code += "\nanswer = tracer.result.save()"
    sampling = {"prompt": [PROMPT, "Hello"], "n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 4}
    body = (await live.post(interventions=[op(code)], return_token_ids=True, **sampling)).json()
    assert len(body["choices"]) == 4
    for choice in body["choices"]:
        answer = saves(choice)["answer"]
        assert saves(choice)["tokens"] == answer["token_ids"] == choice["token_ids"]
        assert answer["text"] == choice["text"]
    refused = await live.post(interventions=[op(code)], stream=True, **sampling)
    assert refused.json()["error"]["code"] == "unsupported_combination"


async def test_large_tensors_are_files(live: Live) -> None:
    code = "kept = save({'every/one': [model.layers[n].output.float() for n in range(30)]})"
    choice = await traced(live, code, prompt=PROMPT * 20, max_tokens=1)
    links = saves(choice)["kept"]["every/one"]
    stored = safetensors.numpy.load((await live.http.get(links[0]["url"])).content)
    assert len(links) == len(stored) == 30
    for link in links:
        assert list(stored[link["key"]].shape) == link["shape"]


class Recorder(Tracer):
    """Keeps a block of the library's."""

    kept: SentBlock

    @override
    def execute(self, function: Any) -> None:
        self.kept = SentBlock(self.info, dict(self.info.variables))


async def test_a_block_that_the_library_wrote_runs_too(live: Live) -> None:
    factor, model = 2, ("envoy", "model")
    with Recorder() as tracer:
        norm = (model.layers[5].output[-1].float().norm() * factor).item()  # type: ignore[attr-defined]
        norm = save(norm)

    def reference(value: Any) -> tuple[str, ...] | None:
        return ("envoy", "model") if value is model else ("tracer",) if value is tracer else None

    data = encode_trace([tracer.kept], {SAVED: []}, reference=reference)
    block = {"op": "trace", "name": "t", "block": base64.b64encode(data).decode()}
    choice = (await live.post(prompt=PROMPT, max_tokens=1, interventions=[block])).json()["choices"][0]
    hidden = tensor_of(saves(await traced(live, HIDDEN, max_tokens=1))["hs"])
    assert saves(choice)["norm"] == pytest.approx(2 * np.linalg.norm(hidden), rel=1e-3)
    for broken in (b"junk", data[:-9], encode_trace([tracer.kept] * 2, reference=reference)):
        bad = {"op": "trace", "block": base64.b64encode(broken).decode()}
        error = (await live.post(prompt=PROMPT, interventions=[bad])).json()["error"]
        assert error["code"] == "trace_failed", error


BAD = [
    ("x = 1\nfor", "invalid_value", "in line 2: `for`"),
    ("x = 1\ny = x / 0", "trace_failed", "in line 2, `y = x / 0`: ZeroDivisionError: division by zero"),
    ("a = model.layers[99]", "trace_failed", "line 1"),
    ("hs = model.layers[9].output\nhs[:] = torch.zeros(3, 3)", "trace_failed", "in line 2"),
    ("late = model.layers[9].output\nearly = model.layers[2].output.save()", "trace_failed", "OutOfOrder"),
    ("class Mine:\n    pass\nodd = save([Mine()])", "trace_failed", "`odd` was saved"),
    ("odd = save(torch.ones(2).double())", "trace_failed", "float64"),
    ("odd = save({(1, 2): 3})", "trace_failed", "key of type tuple"),
    ("c = tracer.cache(modules=[model.layers[0]])\nkept = save([c])", "trace_failed", "was saved"),
    ("raise SystemExit(1)", "trace_failed", "SystemExit"),
    ("odd = save(open)", "trace_failed", "was saved"),
]


@pytest.mark.parametrize(("code", "expected", "told"), BAD, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_code_fails_its_own_request_with_its_line(
    live: Live, code: str, expected: str, told: str, stream: bool
) -> None:
    neighbour = asyncio.create_task(live.post(prompt=PROMPT, max_tokens=12))
    response = await live.post(prompt=PROMPT, stream=stream, max_tokens=12, interventions=[op(code)])
    text = response.text
    assert expected in text
    assert told in text
    if response.status_code != 200 or not stream:
        assert (response.status_code, response.json()["error"]["code"]) == (400, expected)
    assert (await neighbour).json()["choices"][0]["text"].startswith(NEXT)


async def test_neighbours_keep_their_tokens_and_stopping_ends_the_request(live: Live) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    alone = [(await live.post(prompt=prompt)).json()["choices"][0]["text"] for prompt in prompts]
    loop = "for step in tracer.iter[:]:\n    model.layers[3].output[:] = 0\n"
    stop = f"{loop}    if step == 2:\n        tracer.stop()"
    traces = [asyncio.create_task(traced(live, stop, max_tokens=40)) for _ in range(3)]
    together = await asyncio.gather(*(live.post(prompt=prompt) for prompt in prompts))
    assert [response.json()["choices"][0]["text"] for response in together] == alone
    for choice in await asyncio.gather(*traces):
        assert choice["finish_reason"] == "stop"


async def test_a_client_that_leaves_ends_its_trace(live: Live) -> None:
    forever = "for _ in tracer.iter[:]:\n    hs = model.layers[3].output.save()"
    await live.leave_after(2, prompt=PROMPT, max_tokens=500, interventions=[op(forever)])
    task = asyncio.create_task(traced(live, forever, max_tokens=500))
    await asyncio.sleep(0.5)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    engine = live.engine.engine
    await wait_for_async(lambda: not engine.output_processor.request_states and not len(engine.traces), 90)


async def test_a_trace_that_ends_early_ends_no_other_request_of_the_same_name(live: Live) -> None:
    """Clients name their requests, and proxies that try again give two of them one name."""
    named = {"x-request-id": "7"}
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    path = "/v1/completions"
    neighbour = asyncio.create_task(live.http.post(path, json=body, headers=named))
    failing = {**body, "interventions": [op("model.layers[3].output\nraise ValueError('mine')")]}
    leaving = {**body, "interventions": [op("for _ in tracer.iter[:]:\n    model.samples.output")]}
    failed = await live.http.post(path, json=failing, headers=named)
    left = asyncio.create_task(live.http.post(path, json=leaving, headers=named))
    await asyncio.sleep(0.2)
    left.cancel()
    assert failed.json()["error"]["code"] == "trace_failed"
    answer = (await neighbour).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 60)


async def test_capabilities_list_it_and_other_hosts_names_are_refused(live: Live) -> None:
    assert "trace" in (await live.http.get("/v1/capabilities")).json()["operations"]
    response = await live.http.post(
        "/v1/completions",
        json={"prompt": PROMPT, "interventions": [op(HIDDEN)]},
        headers={"host": "evil.example"},
    )
    assert response.json()["error"]["code"] == "host_not_allowed"
