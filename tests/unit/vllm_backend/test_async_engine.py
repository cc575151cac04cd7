"""The asynchronous engine without workers: traces, polled results, pauses, an engine that dies."""

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
from vllm.v1.engine.output_processor import OutputProcessor

from api_schemas.errors import ApiError
from api_schemas.interventions import parse_interventions
from nnsight_engine.core.engine_counts import EngineCounts
from nnsight_engine.vllm_backend import async_engine
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM, carrying
from nnsight_engine.vllm_backend.call import InterventionCall
from nnsight_engine.vllm_backend.pausing_async_llm import PauseRefusedError
from nnsight_engine.vllm_backend.result_router import ResultRouter
from nnsight_engine.vllm_backend.rpc_results import PENDING
from nnsight_engine.vllm_backend.shared_memory_results import SharedMemoryResults, leave
from nnsight_engine.vllm_backend.trace_placement import TracePlacement
from nnsight_engine.vllm_backend.trace_router import TraceEvent
from nnsight_engine.vllm_backend.trace_run import MergedRun, Output, TraceStarted
from nnsight_engine.vllm_backend.traced_requests import TraceRequests
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from tests.fakes.model_specs import tiny_spec

SPEC = tiny_spec()


class Core:
    """vLLM's client of two engines, whose workers' answers a test decides; records the calls."""

    core_engines = (b"first", b"second")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, list[Any]] = {
            "drop_trace": [None],
            "describe_interventions": [SPEC.to_plain()],
        }
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


class Vllm:
    """What replaces vLLM's part of the engine: each request has one output, and a sleep takes a while."""

    def init(self: Any) -> None:
        self.output_handler = self.logger_manager = None
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))
        self.model_config = SimpleNamespace(enable_sleep_mode=True, runner_type="generate")

    async def add_request(self, _request_id: str, _prompt: Any, _params: Any, **_: Any) -> None:
        await asyncio.sleep(0)

    async def generate(
        self: Any, prompt: Any, params: Any, request_id: str, data_parallel_rank: int, lora_request: None
    ) -> AsyncGenerator[Any, None]:
        assert lora_request is None
        core = self.engine_core
        core.calls.append((core.core_engines[data_parallel_rank], "generate", request_id))
        await self.add_request(request_id, prompt, params)
        self.traces.deliver([("key", 0, b"delta", "")], 0)
        yield SimpleNamespace(outputs=[], finished=True, prompt=None, prompt_token_ids=[])

    async def abort(self: Any, request_ids: list[str]) -> None:
        self.engine_core.calls.append(("abort", *request_ids))

    async def sleep(self: Any, level: int, mode: str) -> None:
        self.engine_core.calls.append(("begin", level, mode))
        await asyncio.sleep(0.01)
        self.engine_core.calls.append(("asleep", level, mode))

    async def wake_up(self: Any, tags: Any) -> bool:
        self.engine_core.calls.append(("awake", tags))
        return True


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
async def engine(core: Core, monkeypatch: pytest.MonkeyPatch) -> InterventionAsyncLLM:
    """Return the server's engine, which knows its model."""
    for name in ("add_request", "generate", "abort", "sleep", "wake_up"):
        monkeypatch.setattr(AsyncLLM, name, getattr(Vllm, name))
    monkeypatch.setattr(AsyncLLM, "__init__", Vllm.init)
    for name in ("__del__", "_run_output_handler"):
        monkeypatch.setattr(AsyncLLM, name, lambda _: None)
    engine: Any = InterventionAsyncLLM()
    engine.engine_core = core
    assert await engine.describe() == SPEC
    core.calls.clear()
    found: InterventionAsyncLLM = engine
    return found


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


def test_a_trace_goes_where_the_fewest_requests_are_or_will_be() -> None:
    placement = TracePlacement(3)

    def placed(key: str, num_requests: int, *in_flight: int) -> int:
        placement.place(key, num_requests, in_flight)
        return placement.rank(key)

    assert placed("first", 1, 4, 2, 3) == 1
    placement.remove("first")
    assert [placed(key, size, 0, 0, 0) for key, size in (("a", 5), ("b", 2), ("c", 3))] == [2, 0, 1]
    assert placed("d", 1, 0, 0, 0) == 0, "they are not sent yet, and count"
    placement.remove("a")
    placement.remove("a")
    assert placed("e", 1, 0, 0, 0) == 2


async def test_counts_of_engines_are_added(engine: InterventionAsyncLLM, core: Core) -> None:
    first, second = EngineCounts(), EngineCounts()
    first.steps["tap"], second.steps["tap"], second.steps["plain"] = 2, 3, 1
    first.note_time(0.02)
    second.note_time(0.02)
    second.sandboxes["started"] = 4
    core.answers["count_events"] = [first.to_plain(), second.to_plain()]
    total = await engine.count_events()
    assert core.calls == [(one, "count_events") for one in core.core_engines]
    assert (total.steps, total.sandboxes["started"]) == ({"plain": 1, "tap": 5, "eager": 0}, 4)
    assert sum(total.intervention_buckets) == 2
    assert total.intervention_s == pytest.approx(0.04)


async def test_sandboxes_are_ready_once_every_engine_has_one(
    engine: InterventionAsyncLLM, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "_SANDBOX_POLL_S", 0.0)
    core.answers["prepare_sandbox"] = [(True, None), (False, None), (True, None)]
    await engine.prepare_sandbox()
    assert len(core.calls) == 4
    await engine.describe()
    core.answers["prepare_sandbox"] = [(True, None), (False, {"message": "no namespaces"})]
    with pytest.raises(ApiError, match="no namespaces"):
        await engine.prepare_sandbox()


@pytest.mark.parametrize("failing", ["open", "PromptEntry", "prepare_params", "salted"])
async def test_a_prompt_that_fails_on_its_way_into_the_engine_leaves_no_tensors(
    engine: InterventionAsyncLLM, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(ResultRouter if failing == "open" else async_engine, failing, fail)
    steer = {"op": "steer", "at": "layers.0.output", "vector": [1.0] * SPEC.hidden_size}
    call = InterventionCall(parse_interventions([steer]), SPEC, len, stream=False)
    with pytest.raises(MemoryError), carrying(call):
        engine.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=4), "request")
    engine.close_call(call)
    assert (len(engine._contents), len(engine.router)) == (0, 0)


@pytest.mark.parametrize(
    ("frees_memory", "level", "mode", "reason"),
    [
        (False, 1, "wait", "--enable-sleep-mode"),
        (True, 1, "keep", "mode=wait"),
        (True, 2, "wait", "discards the weights"),
    ],
)
async def test_a_sleep_that_would_go_wrong_is_refused(
    engine: InterventionAsyncLLM, core: Core, *, frees_memory: bool, level: int, mode: Any, reason: str
) -> None:
    engine.model_config.enable_sleep_mode = frees_memory
    with pytest.raises(PauseRefusedError, match=reason):
        await engine.sleep(level, mode)
    assert not core.calls


@pytest.mark.parametrize("level", [0, 1])
async def test_an_engine_that_frees_memory_is_woken_up_only_once_it_sleeps(
    engine: InterventionAsyncLLM, core: Core, level: int
) -> None:
    sleeping = asyncio.create_task(engine.sleep(level, "wait"))
    for _ in range(5):  # until it waits
        await asyncio.sleep(0)
    assert await engine.wake_up()
    await sleeping
    slept, woken = ("asleep", level, "wait"), ("awake", None)
    assert core.calls == [("begin", level, "wait"), *((slept, woken) if level else (woken, slept))]


async def test_a_pause_ends_with_its_engine(engine: InterventionAsyncLLM, core: Core) -> None:
    engine.output_handler = asyncio.create_task(asyncio.sleep(0))
    with pytest.raises(EngineDeadError):
        await engine.sleep(1, "wait")
    assert ("asleep", 1, "wait") not in core.calls
