"""The engine's side of traces, without workers: arrivals, polled results, an engine that dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM
from nnsight_engine.vllm_backend.rpc_results import PENDING
from nnsight_engine.vllm_backend.shared_memory_results import SharedMemoryResults, leave
from nnsight_engine.vllm_backend.trace_router import TraceEvent
from nnsight_engine.vllm_backend.trace_run import MergedRun, Output, TraceStarted
from nnsight_engine.vllm_backend.traced_requests import TraceRequests
from nnsight_engine.vllm_backend.traces.entry import TraceEntry


class Workers:
    """The workers, whose answers a test decides; records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, list[Any]] = {"drop_trace": [None]}

    async def __call__(self, _engine: Any, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Return the next answer for a method; the last one again and again."""
        self.calls.append((method, *args))
        answers = self.answers.get(method, [None])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if found is asyncio.Event:
            await asyncio.Event().wait()
        return [found]


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def engine(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> InterventionAsyncLLM:
    """Return the server's engine with vLLM's part replaced: each request has one output."""

    def init(engine: Any) -> None:
        engine.output_handler = None

    async def add_request(_engine: Any, _request_id: str, _prompt: Any, _params: Any, **_: Any) -> None:
        await asyncio.sleep(0)

    async def generate(engine: Any, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        await engine.add_request(request_id, prompt, params)
        engine.traces.deliver([("key", 0, b"delta", "")], 0)
        yield type("Out", (), {"outputs": [], "finished": True, "prompt": None, "prompt_token_ids": []})()

    async def abort(_engine: Any, request_ids: list[str]) -> None:
        workers.calls.append(("abort", *request_ids))

    async def rpc(engine: Any, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return await workers(engine, method, args)

    for name, fake in (
        ("__init__", init), ("add_request", add_request), ("generate", generate), ("abort", abort),
        ("collective_rpc", rpc), ("__del__", lambda _: None),
    ):  # fmt: skip
        monkeypatch.setattr(AsyncLLM, name, fake)
    return InterventionAsyncLLM()


def one_request(held: bytes | None = None) -> TraceRequests:
    requests = TraceRequests("key", held)
    requests.add(
        {"prompt_token_ids": [1]}, SamplingParams(n=2), TraceEntry("key", 0, 2, b"", [], sandbox_of=None)
    )
    return requests


async def test_a_trace_starts_once_with_its_request_and_is_aborted_when_it_is_not_finished(
    engine: InterventionAsyncLLM, workers: Workers
) -> None:
    async with MergedRun(engine, one_request(b"blocks")) as run:
        kinds = [type(event) async for event in run]
    assert kinds == [TraceStarted, TraceEvent, Output]
    assert workers.calls == [("hold_trace", "key", b"blocks"), ("abort", "key-0"), ("drop_trace", "key")]
    assert len(engine.traces) == 0


async def test_results_are_polled_for_and_large_ones_read_from_memory(
    engine: InterventionAsyncLLM, workers: Workers, tmp_path: Path
) -> None:
    engine.handover = SharedMemoryResults(tmp_path)
    assert leave([b"x" * 2**21], engine.handover.path("key"))
    workers.answers["finish_trace"] = [PENDING, PENDING, (None, "printed", "", 0.5, "eager", True)]
    async with MergedRun(engine, one_request()) as run:
        _ = [event async for event in run]
        finished = await run.finish()
    assert (bytes(finished.data), finished.printed, finished.tier) == (b"x" * 2**21, "printed", "eager")
    assert [call[0] for call in workers.calls] == ["finish_trace"] * 3
    assert not any(os.scandir(tmp_path))


async def test_calls_of_workers_fail_when_the_engine_dies(
    engine: InterventionAsyncLLM, workers: Workers
) -> None:
    dies = asyncio.Event()
    engine.output_handler = asyncio.create_task(dies.wait())
    workers.answers["finish_trace"] = [asyncio.Event]
    async with MergedRun(engine, one_request()) as run:
        _ = [event async for event in run]
        ending = asyncio.create_task(run.finish())
        await asyncio.sleep(0)
        dies.set()
        with pytest.raises(EngineDeadError):
            await ending
