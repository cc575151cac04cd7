"""The engine's side of traces, without workers: arrivals, polled results, an engine that dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from api_schemas.errors import ApiError
from nnsight_engine.core.engine_counts import EngineCounts
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM
from nnsight_engine.vllm_backend.rpc_results import PENDING
from nnsight_engine.vllm_backend.shared_memory_results import SharedMemoryResults, leave
from nnsight_engine.vllm_backend.trace_router import TraceEvent
from nnsight_engine.vllm_backend.trace_run import MergedRun, Output, TraceStarted
from nnsight_engine.vllm_backend.traced_requests import TraceRequests
from nnsight_engine.vllm_backend.traces.entry import TraceEntry


class Core:
    """vLLM's client of two engines, whose workers' answers a test decides; records the calls."""

    core_engines = (b"first", b"second")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, list[Any]] = {"drop_trace": [None]}
        self.engine_inflight = dict.fromkeys(self.core_engines, 0)

    def shutdown(self, **_: Any) -> None:
        """End nothing; called when the engine is collected as garbage."""

    async def _call_utility_async(
        self, utility: str, method: str, limit_s: None, args: tuple[Any, ...], kwargs: None, *, engine: bytes
    ) -> list[Any]:
        """Return the next answer for a method; the last one again and again."""
        assert (utility, limit_s, kwargs) == ("collective_rpc", None, None)
        self.calls.append((engine, method, *args))
        answers = self.answers.get(method, [None])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if found is asyncio.Event:
            await asyncio.Event().wait()
        return [found]

    async def call_utility_all_async(self, *args: Any) -> list[list[Any]]:
        return [await self._call_utility_async(*args, engine=engine) for engine in self.core_engines]


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def engine(core: Core, monkeypatch: pytest.MonkeyPatch) -> InterventionAsyncLLM:
    """Return the server's engine with vLLM's part replaced: each request has one output."""

    def init(engine: Any) -> None:
        engine.output_handler = None
        engine.engine_core = core
        engine.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))

    async def add_request(_engine: Any, _request_id: str, _prompt: Any, _params: Any, **_: Any) -> None:
        await asyncio.sleep(0)

    async def generate(
        engine: Any, prompt: Any, params: Any, request_id: str, data_parallel_rank: int, lora_request: None
    ) -> AsyncGenerator[Any, None]:
        assert lora_request is None
        core.calls.append((core.core_engines[data_parallel_rank], "generate", request_id))
        await engine.add_request(request_id, prompt, params)
        engine.traces.deliver([("key", 0, b"delta", "")], 0)
        yield type("Out", (), {"outputs": [], "finished": True, "prompt": None, "prompt_token_ids": []})()

    async def abort(_engine: Any, request_ids: list[str]) -> None:
        core.calls.append(("abort", *request_ids))

    for name, fake in (
        ("__init__", init), ("add_request", add_request), ("generate", generate), ("abort", abort),
        ("__del__", lambda _: None),
    ):  # fmt: skip
        monkeypatch.setattr(AsyncLLM, name, fake)
    return InterventionAsyncLLM()


def one_request(held: bytes | None = None, key: str = "key") -> TraceRequests:
    requests = TraceRequests(key, held)
    requests.add(
        {"prompt_token_ids": [1]}, SamplingParams(n=2), TraceEntry(key, 0, 2, b"", [], sandbox_of=None)
    )
    return requests


async def test_a_trace_starts_once_with_its_request_and_is_aborted_when_it_is_not_finished(
    engine: InterventionAsyncLLM, core: Core
) -> None:
    async with MergedRun(engine, one_request(b"blocks")) as run:
        kinds = [type(event) async for event in run]
    assert kinds == [TraceStarted, TraceEvent, Output]
    assert core.calls == [
        (b"first", "hold_trace", "key", b"blocks"),
        (b"first", "generate", "key-0"),
        ("abort", "key-0"),
        (b"first", "drop_trace", "key"),
    ]
    assert len(engine.traces) == 0


async def test_results_are_polled_for_and_large_ones_read_from_memory(
    engine: InterventionAsyncLLM, core: Core, tmp_path: Path
) -> None:
    engine.handover = SharedMemoryResults(tmp_path)
    assert leave([b"x" * 2**21], engine.handover.path("key"))
    core.answers["finish_trace"] = [PENDING, PENDING, (None, "printed", "", 0.5, "eager", True)]
    async with MergedRun(engine, one_request()) as run:
        _ = [event async for event in run]
        finished = await run.finish()
    assert (bytes(finished.data), finished.printed, finished.tier) == (b"x" * 2**21, "printed", "eager")
    assert [call[1] for call in core.calls] == ["generate", *["finish_trace"] * 3]
    assert not any(os.scandir(tmp_path))


async def test_calls_of_workers_fail_when_the_engine_dies(engine: InterventionAsyncLLM, core: Core) -> None:
    dies = asyncio.Event()
    engine.output_handler = asyncio.create_task(dies.wait())
    core.answers["finish_trace"] = [asyncio.Event]
    async with MergedRun(engine, one_request()) as run:
        _ = [event async for event in run]
        ending = asyncio.create_task(run.finish())
        await asyncio.sleep(0)
        dies.set()
        with pytest.raises(EngineDeadError):
            await ending


async def test_each_trace_stays_on_one_engine_and_traces_take_turns(
    engine: InterventionAsyncLLM, core: Core
) -> None:
    core.answers["finish_trace"] = [(b"", "", "", 0.0, "tap", True)]
    for key in ("a", "b", "c"):
        async with MergedRun(engine, one_request(b"blocks", key)) as run:
            _ = [event async for event in run]
            await run.finish()
    engines = {key: {call[0] for call in core.calls if key in call[2]} for key in ("a", "b", "c")}
    assert engines == {"a": {b"first"}, "b": {b"second"}, "c": {b"first"}}


async def test_calls_of_all_workers_return_the_results_of_all_engines(
    engine: InterventionAsyncLLM, core: Core
) -> None:
    core.answers["keep_edit"] = ["one", "two"]
    assert await engine.collective_rpc("keep_edit", args=("calm", b"block")) == ["one", "two"]
    assert core.calls == [(one, "keep_edit", "calm", b"block") for one in core.core_engines]


async def test_counts_of_engines_are_added(engine: InterventionAsyncLLM, core: Core) -> None:
    first, second = EngineCounts(), EngineCounts()
    first.steps["tap"], second.steps["tap"], second.steps["plain"] = 2, 3, 1
    first.note_time(0.02)
    second.note_time(0.02)
    second.sandboxes["started"] = 4
    core.answers["count_events"] = [first.to_plain(), second.to_plain()]
    total = await engine.count_events()
    assert (total.steps, total.sandboxes["started"]) == ({"plain": 1, "tap": 5, "eager": 0}, 4)
    assert sum(total.intervention_buckets) == 2
    assert total.intervention_s == pytest.approx(0.04)


async def test_sandboxes_are_ready_once_every_engine_has_one(
    engine: InterventionAsyncLLM, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnsight_engine.vllm_backend.async_engine._SANDBOX_POLL_S", 0.0)
    engine._has_sandbox = False
    core.answers["prepare_sandbox"] = [(True, None), (False, None), (True, None)]
    await engine.prepare_sandbox()
    assert len(core.calls) == 4
    engine._has_sandbox = False
    core.answers["prepare_sandbox"] = [(True, None), (False, {"message": "no namespaces"})]
    with pytest.raises(ApiError, match="no namespaces"):
        await engine.prepare_sandbox()
