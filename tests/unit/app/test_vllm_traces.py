"""Clients' traces on vLLM: the frames of their answers, errors of single requests, and their end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from vllm.exceptions import VLLMValidationError

from api_schemas.errors import ApiError
from app.engine.vllm_traces import VLLMTraceEngine
from app.settings import Settings
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import SentInvoke, TraceHead, TraceRequest
from nnsight_engine.remote_backend.saved_deltas import OutputReader
from nnsight_engine.serialization import encode
from tests.unit.vllm_backend.scripted_engine import Engine


def run(engine: Engine, *prompts: str, **head: Any) -> AsyncGenerator[Frame, None]:
    """Run a trace with a request for each prompt."""
    invokes = [SentInvoke(prompt=prompt) for prompt in prompts]
    request = TraceRequest(
        TraceHead(model="m", dialect="vllm", invokes=invokes, groups=[{} for _ in prompts], **head),
        [b"blocks"],
    )
    request.sandbox_of = None
    no_sandboxes: Any = None
    traces = VLLMTraceEngine(lambda: cast(Any, engine), lambda _: None, Settings(), no_sandboxes)
    return traces.run_trace(request, "job")


def delta(**whole: Any) -> bytes:
    return encode({"whole": whole, "grown": {}})


async def test_a_streamed_trace_has_its_start_outputs_with_values_and_results() -> None:
    engine = Engine(result=b"result")
    engine.script = {"a": [delta(x=1), 1, delta(x=2), 2], "b": [1]}
    frames = [frame async for frame in run(engine, "a", "b", streams=True)]
    kinds = [frame.kind for frame in frames]
    assert (kinds[0], kinds[-2:]) == (FrameKind.EVENT, [FrameKind.OUTPUTS, FrameKind.RESULT])
    assert frames[0].json()["status"] == "RUNNING"
    reader = OutputReader()
    outputs = [reader.read(frame.data) for frame in frames[1:-2]]
    assert [(one.saves, one.finished) for one in outputs if one.invoke == 0] == [
        ({"x": 1}, False),
        ({"x": 2}, True),
    ]
    assert [one.saves for one in outputs if one.invoke == 1] == [{}]
    assert frames[-1].data == b"result"
    assert (engine.held, engine.forgotten) == ({"job": b"blocks"}, [])


@pytest.mark.parametrize("failing", [0, 1])
async def test_an_error_of_vllm_names_the_request_and_ends_the_trace(failing: int) -> None:
    engine = Engine()
    engine.script = {"endless": range(1, 10**9), "refused": [VLLMValidationError("no", parameter="top_k")]}
    prompts = ["endless", "endless"]
    prompts[failing] = "refused"
    with pytest.raises(ApiError) as caught:
        _ = [frame async for frame in run(engine, *prompts)]
    assert caught.value.param == f"invokes.{failing}.sampling.top_k"
    assert (engine.num_running, engine.forgotten) == (0, ["job"])


async def test_a_client_that_leaves_ends_the_trace() -> None:
    engine = Engine()
    engine.script = {"endless": range(1, 10**9)}
    frames = run(engine, "endless", streams=True)
    while (await anext(frames)).kind is not FrameKind.OUTPUT:
        pass
    await frames.aclose()
    assert (engine.num_running, len(engine.traces), engine.forgotten) == (0, 0, ["job"])
