"""Blocks that come over HTTP and run in vLLM: values, errors, prints, streams, clients that leave."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
import torch
from prometheus_client.parser import text_string_to_metric_families

from app.observability import scraping
from nnsight_engine import LanguageModel, save
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.client.http import Progress
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind, FrameReader
from nnsight_engine.remote_backend.messages import MEDIA_TYPE, SentInvoke, TraceHead, TraceRequest
from nnsight_engine.remote_backend.values.outcomes import read_outcomes
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.live import MODEL, Live, live_server
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 9, 11, 3, 17, 8]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
HEADERS = {"content-type": MEDIA_TYPE}
OPTIONS = ("--max-model-len", "128", "--dtype", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("http"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    async with live_server(folder, tmp_path_factory.mktemp("results"), *OPTIONS) as live:
        yield live


@pytest_asyncio.fixture(loop_scope="module")
async def server(live: Live) -> AsyncIterator[Live]:
    """Give the server to a test, after which it holds nothing of any trace."""
    yield live
    assert not any((await live.held()).values())


@pytest.fixture(scope="module")
def model(folder: Path, live: Live) -> VLLM:
    """Return what a client has: the model's name and the server's address."""
    return VLLM(str(folder), remote=str(live.http.base_url))


class Recorder:
    """Keeps what would be sent, so that a test can send it as it likes."""

    name = "recorder"

    def __init__(self, outline: dict[str, Any]) -> None:
        self.sent: list[TraceRequest] = []
        self._outline = outline

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Any:
        self.sent.append(request)
        raise RemoteError("it was only recorded")

    def stream(self, request: TraceRequest) -> Any:
        raise NotImplementedError

    def outline(self) -> dict[str, Any]:
        return self._outline


def endless(model: VLLM, outline: dict[str, Any], **sampling: Any) -> TraceRequest:
    """Return a trace that goes on for as long as it can, and prints at every step."""
    recorder = Recorder(outline)
    options = {**GREEDY, "max_tokens": 100, **sampling}
    with pytest.raises(RemoteError, match="only recorded"):
        with model.trace(PROMPT, backend=RemoteBackend(transport=recorder), **options) as tracer:
            hidden = save([])
            for step in tracer.iter[:]:
                print("step", step)  # noqa: T201 - it is what is tested
                hidden.append(model.layers[1].output)
    return recorder.sent[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outline(live: Live) -> dict[str, Any]:
    body: dict[str, Any] = (await live.http.get("/v1/traces/outline")).json()
    return body


async def frames_of(live: Live, content: bytes) -> AsyncIterator[Frame]:
    """Send a trace and yield the answer's frames as they come."""
    reader = FrameReader(2**30)
    async with live.http.stream("POST", "/v1/traces", content=content, headers=HEADERS) as response:
        assert response.status_code == 200, await response.aread()
        async for chunk in response.aiter_raw():
            for frame in reader.feed(chunk):
                yield frame


async def test_values_are_those_of_the_model(server: Live, model: VLLM, folder: Path) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor, Any]:
        with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
            hidden = model.layers[1].output.save()
            model.layers[2].output[:] = 0
            logits = model.logits.output.save()
            result = tracer.result.save()
        assert (tracer.backend.engine, tracer.backend.tier) == ("vllm", "tap")
        return hidden, logits, result

    hidden, logits, result = await asyncio.to_thread(run)
    local = LanguageModel(str(folder), dispatch=True, dtype=torch.float32)
    with local.trace(torch.tensor([PROMPT])):
        expected = local.layers[1].output.save()
        local.layers[2].output[:] = 0
        expected_logits = local.lm_head.output[:, -1].save()
    torch.testing.assert_close(hidden, expected[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(logits[:, : expected_logits.shape[1]], expected_logits, rtol=1e-3, atol=1e-3)
    assert len(result.outputs[0].token_ids) == 3


async def test_answers_and_metrics_say_which_steps_ran_uncompiled(
    server: Live, model: VLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "_PAUSE_S", 0)

    def run(*, waits: bool) -> Any:
        with model.trace(PROMPT, max_tokens=1, blocking=waits, **GREEDY) as tracer:
            inside = model.layers[1].mlp.output.save()  # noqa: F841 - it is waited for
        if not waits:
            assert tracer.backend.tier is None
            tracer.backend.wait()
        return tracer.backend.tier

    async def counted() -> dict[str, float]:
        text = (await server.http.get("/metrics")).text
        assert "vllm:generation_tokens_total" in text
        (steps,) = [one for one in text_string_to_metric_families(text) if one.name == "nnsight_engine_steps"]
        return {sample.labels["tier"]: sample.value for sample in steps.samples}

    before = await counted()
    assert await asyncio.to_thread(run, waits=True) == "eager"
    assert await asyncio.to_thread(run, waits=False) == "eager"
    await server.post(prompt=PROMPT, max_tokens=4, ignore_eos=True)
    after = await counted()
    assert after["eager"] == before["eager"] + 2
    assert after["plain"] >= before["plain"] + 4


async def test_a_block_that_fails_lets_the_others_go_on(
    server: Live, model: VLLM, outline: dict[str, Any]
) -> None:
    recorder = Recorder(outline)
    with pytest.raises(RemoteError, match="only recorded"):
        with model.trace(backend=RemoteBackend(transport=recorder), max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                _ = PROMPT[100]
            with tracer.invoke(PROMPT):
                kept = model.layers[0].output.shape.save()  # noqa: F841 - looked up by name
    frames = [frame async for frame in frames_of(server, recorder.sent[0].to_bytes())]
    failed, fine = read_outcomes(frames[-1].data, [])
    assert isinstance(failed.error, IndexError)
    assert list(fine.saves["kept"]) == [6, 128]


def shout(text: str) -> None:
    print(text.upper())  # noqa: T201 - it is what is tested


async def test_prints_come_while_the_trace_runs(
    server: Live, model: VLLM, outline: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(outline)
    with pytest.raises(RemoteError, match="only recorded"):
        with model.trace(PROMPT, backend=RemoteBackend(transport=recorder), max_tokens=3, **GREEDY) as tracer:
            for step in tracer.iter[:]:
                shout(f"step {step}")
            print("the end,", end=" ")  # noqa: T201 - it is what is tested
            _ = tracer.result
            print("all of it")  # noqa: T201 - it is what is tested
    request = recorder.sent[0]
    head = msgspec.structs.replace(request.head, streams=True)
    content = TraceRequest(head, request.parts).to_bytes()
    told = [
        frame.json().get("message") or frame.json()["status"] if frame.kind is FrameKind.EVENT else frame.kind
        async for frame in frames_of(server, content)
    ]
    output = FrameKind.OUTPUT
    assert [one for one in told if one is not output] == [
        *("RECEIVED", "DISPATCHED", "RUNNING", "STEP 0", "STEP 1", "STEP 2"),
        *("the end, all of it", FrameKind.OUTPUTS, "COMPLETED", FrameKind.RESULT),
    ]
    # vLLM may join the outputs of two steps, where its reader was slow.
    assert told.index("STEP 0") < told.index(output) < told.index("the end, all of it")
    assert "STEP" not in capfd.readouterr().out


async def test_outputs_are_streamed_with_what_was_saved_up_to_them(server: Live, folder: Path) -> None:
    model = VLLM(str(folder), remote=str(server.http.base_url), mode="async")

    def begin() -> Any:
        with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
            tokens, hidden = save([]), save([])
            for _ in tracer.iter[:]:
                hidden.append(model.layers[1].output)
                tokens.append(model.samples.output.item())
            result = tracer.result.save()  # noqa: F841 - looked up by name
        return tracer

    tracer = await asyncio.to_thread(begin)
    outputs = [output async for output in tracer.backend()]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for output in outputs:
        assert output.saves["tokens"] == output.outputs[0].token_ids
        assert len(output.saves["hidden"]) == len(output.saves["tokens"])
    assert outputs[-1].saves["result"].outputs[0].token_ids == outputs[-1].saves["tokens"]


async def test_a_client_that_leaves_ends_its_requests_and_neighbours_go_on(
    server: Live, model: VLLM, outline: dict[str, Any]
) -> None:
    async def plain() -> Any:
        answer = await server.post(prompt=PROMPT, max_tokens=60, ignore_eos=True)
        return answer.json()["choices"][0]["text"]

    async def leave(after: str) -> None:
        content = endless(model, outline, n=2, temperature=1.0).to_bytes()
        async for frame in frames_of(server, content):
            if frame.kind is FrameKind.EVENT and frame.json()["status"] == after:
                return
        raise AssertionError(f"it ended before {after}")

    alone = await plain()
    texts = await asyncio.gather(plain(), leave("RUNNING"), plain(), leave("LOG"), leave("LOG"), plain())
    assert [text for text in texts if text is not None] == [alone] * 3
    # `server` sees to it that nothing is held.


async def test_one_bad_request_ends_those_beside_it(
    server: Live, model: VLLM, outline: dict[str, Any]
) -> None:
    request = endless(model, outline)
    (good,) = request.head.invokes
    too_long = SentInvoke(prompt=[1] * 500)
    head = msgspec.structs.replace(
        request.head, invokes=[good, too_long, good], groups=[*request.head.groups] * 3
    )
    response = await send(server, TraceRequest(head, request.parts))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "invokes.1.prompt"
    assert "maximum context length" in response.json()["error"]["message"]


async def send(live: Live, request: TraceRequest | bytes) -> httpx.Response:
    content = request if isinstance(request, bytes) else request.to_bytes()
    return await live.http.post("/v1/traces", content=content, headers=HEADERS)


async def test_hostile_heads_are_refused(server: Live, model: VLLM, outline: dict[str, Any]) -> None:
    request = endless(model, outline, max_tokens=1)
    (invoke,) = request.head.invokes

    async def code(**changes: Any) -> str:
        head = msgspec.structs.replace(request.head, **changes)
        response = await send(server, TraceRequest(head, request.parts))
        assert 400 <= response.status_code < 500, response.content[:200]
        return str(response.json()["error"]["code"])

    def invokes(**changes: Any) -> list[SentInvoke]:
        return [msgspec.structs.replace(invoke, **changes)]

    assert await code(invokes=[]) == "invalid_trace"
    assert await code(groups=[]) == "invalid_trace"
    assert await code(groups=[{}, {}]) == "invalid_trace"
    assert await code(groups=[{"x": 2**70}]) == "invalid_trace"
    assert await code(num_edits=1) == "invalid_trace"
    assert await code(codec="cloudpickle") == "codec_not_allowed"
    assert await code(invokes=invokes(prompt=[])) == "invalid_value"
    assert await code(invokes=invokes(prompt=[2**70])) == "invalid_trace"
    assert await code(invokes=invokes(prompt=[10**6])) == "invalid_value"
    assert await code(invokes=invokes(sampling={"n": 10_000})) == "invalid_value"
    assert await code(invokes=[invoke] * 300, groups=[{}] * 300) == "invalid_value"
    assert await code(invokes=invokes(sampling={"temperature": -1})) == "invalid_value"
    assert await code(invokes=invokes(sampling={"extra_args": {TRACE_KEY: "x"}})) == "bad_request"
    assert await code(invokes=invokes(sampling={"stop_token_ids": [-5], "min_tokens": 2})) == "invalid_value"
    assert await code(invokes=invokes(sampling={"logit_bias": {10**6: 1.0}})) == "invalid_value"
    raw = b'{"model": "' + MODEL.encode() + b'", "dialect": "vllm", "parts": [3], "invokes": 7}'
    broken = await send(server, b"NNSR" + struct.pack("<BxxxI", 1, len(raw)) + raw + b"abc")
    assert broken.json()["error"]["code"] == "invalid_trace"


async def test_blocks_that_cannot_be_read_are_errors_of_theirs(server: Live) -> None:
    for blocks in (b"", b"garbage", b"\x00" * 1000):
        for num in (1, 2):
            head = TraceHead(
                model=MODEL, dialect="vllm", invokes=[SentInvoke(prompt=PROMPT)] * num, groups=[{}] * num
            )
            frames = [frame async for frame in frames_of(server, TraceRequest(head, [blocks]).to_bytes())]
            outcomes = read_outcomes(frames[-1].data, [])
            assert [type(outcome.error).__name__ for outcome in outcomes] == ["DecodeError"] * num


async def test_results_are_compressed_on_request(server: Live, model: VLLM, outline: dict[str, Any]) -> None:
    recorder = Recorder(outline)
    with pytest.raises(RemoteError, match="only recorded"):
        with model.trace(PROMPT, backend=RemoteBackend(transport=recorder)):
            zeros = save(torch.zeros(10_000))  # noqa: F841 - looked up by name
    sizes = []
    for accepts in ([], ["zstd"]):
        head = msgspec.structs.replace(recorder.sent[0].head, accepts=accepts)
        request = TraceRequest(head, recorder.sent[0].parts)
        frames = [frame async for frame in frames_of(server, request.to_bytes())]
        (outcome,) = read_outcomes(frames[-1].data, [])
        assert torch.equal(outcome.saves["zeros"], torch.zeros(10_000))
        sizes.append(len(frames[-1].data))
    assert sizes[1] < sizes[0] / 10


@pytest.mark.heavy
async def test_waiting_requests_get_an_error_when_the_engine_dies(
    folder: Path, model: VLLM, outline: dict[str, Any], tmp_path: Path
) -> None:
    async with live_server(folder, tmp_path, *OPTIONS) as mortal:
        last: Frame | None = None
        async for frame in frames_of(mortal, endless(model, outline).to_bytes()):
            last = frame
            if frame.kind is FrameKind.EVENT and frame.json()["status"] == "LOG":
                for process in mortal.engine.engine.engine_core.resources.engine_manager.processes:
                    os.kill(process.pid, signal.SIGKILL)
        assert last is not None
        assert last.kind is FrameKind.ERROR
        assert last.json()["error"]["code"] == "engine_dead"
        response = await send(mortal, endless(model, outline))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
