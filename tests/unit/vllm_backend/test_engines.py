"""The engines behind ``VLLM``: vLLM's classes, with a played model; edits that they keep."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm import LLM, SamplingParams
from vllm.utils.counter import Counter
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor

from nnsight_engine.vllm_backend import engine_start
from nnsight_engine.vllm_backend.edits import EditBook, Edits, EngineEdit
from nnsight_engine.vllm_backend.engines import AsyncEngine, SyncEngine
from nnsight_engine.vllm_backend.traced_requests import TraceRequests
from nnsight_engine.vllm_backend.traces.edits import digest_of
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.unit.vllm_backend.scripted_engine import Engine
from tests.waiting import wait_for


class PlayedCore:
    """Answers each request with its first prompt token plus the choice's seed, one request per step."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.before_step: Callable[[], None] = lambda: None
        self.before_add: Callable[[], None] = lambda: None
        self.at_work = threading.Lock()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.before_add()
        assert request.prompt_token_ids is not None
        self.running[request.request_id] = request.prompt_token_ids[0]

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def get_output(self) -> EngineCoreOutputs:
        assert self.at_work.acquire(blocking=False), "two threads step the engine at once"
        try:
            self.before_step()
            request_id = next(reversed(self.running))  # the newest first: outputs arrive in any order
            output = EngineCoreOutput(
                request_id, [self.running.pop(request_id)], finish_reason=FinishReason.LENGTH
            )
            return EngineCoreOutputs(outputs=[output])
        finally:
            self.at_work.release()

    def dp_engines_running(self) -> bool:
        return False


def _process(request_id: str, prompt: Any, params: SamplingParams, **_: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, prompt["prompt_token_ids"], None, params, None, 0.0, None, None, None
    )


@pytest.fixture
def core() -> PlayedCore:
    return PlayedCore()


@pytest.fixture
def host(core: PlayedCore, monkeypatch: pytest.MonkeyPatch) -> SyncEngine:
    engine: Any = LLMEngine.__new__(LLMEngine)
    engine.output_processor = OutputProcessor(None, log_stats=False)
    engine.engine_core, engine.dp_group, engine.log_stats = core, None, False
    engine.should_execute_dummy_batch, engine.logger_manager, engine.model_config = False, None, None
    engine._supported_tasks = ("generate",)
    engine.input_processor = InputProcessor.__new__(InputProcessor)
    engine.input_processor.process_inputs = _process
    engine.renderer = SimpleNamespace(mm_processor_cache=None)
    monkeypatch.setattr("vllm.v1.engine.llm_engine.extract_prompt_components", lambda *_: (None, None, None))
    inner: Any = LLM.__new__(LLM)
    inner.llm_engine, inner.request_counter = engine, Counter()
    inner.model_config = SimpleNamespace(runner_type="generate")
    inner._preprocess_cmpl_one = lambda prompt, *_, **__: prompt
    inner._resolve_mm_lora = lambda *_: None
    inner.collective_rpc = lambda method, args: [(method, *args)]
    monkeypatch.setattr("nnsight_engine.vllm_backend.engines.LLM", lambda **_: inner)
    return SyncEngine({})


def run(host: SyncEngine, *tokens: int, n: int = 1) -> list[list[int]]:
    """Run a request for each token, and return the tokens of its choices."""
    prompts = [{"prompt_token_ids": [token]} for token in tokens]
    outputs = host.run(prompts, [SamplingParams(n=n, detokenize=False, max_tokens=1) for _ in tokens])
    return [[token for choice in output.outputs for token in choice.token_ids] for output in outputs]


def raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_outputs_are_in_the_order_of_the_prompts(host: SyncEngine) -> None:
    assert run(host, *range(12), n=2) == [[token] * 2 for token in range(12)]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("a step failed"), SystemExit(1)], ids=repr
)
@pytest.mark.parametrize("where", ["before_step", "before_add"])
@pytest.mark.parametrize("n", [1, 3])
def test_requests_of_a_run_that_did_not_end_are_aborted(
    host: SyncEngine, core: PlayedCore, error: BaseException, where: str, n: int
) -> None:
    calls = iter(range(100))
    setattr(core, where, lambda: raises(error)() if next(calls) == 1 else None)
    with pytest.raises(type(error)):
        run(host, 1, 2, 3, n=n)
    setattr(core, where, lambda: None)
    assert core.running == {}
    assert run(host, 7) == [[7]]
    assert not host.inner.llm_engine.has_unfinished_requests()
    assert not host.inner.llm_engine.output_processor.parent_requests


def test_threads_take_turns_and_each_has_its_own_outputs(host: SyncEngine, core: PlayedCore) -> None:
    core.before_step = lambda: time.sleep(0.001)
    found: dict[int, list[list[list[int]]]] = {}

    def work(number: int) -> None:
        found[number] = [run(host, number, 100 + number) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: [[[number], [100 + number]]] * 5 for number in range(4)}


def test_an_interrupt_ends_the_trace_on_the_engines_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    main, inner = threading.get_ident(), Engine()

    def outputs() -> Iterator[int]:
        yield 1
        signal.pthread_kill(main, signal.SIGINT)
        yield from range(2, 10**9)

    async def started(_: Any) -> Any:
        return inner

    monkeypatch.setattr(AsyncEngine, "_started", staticmethod(started))
    monkeypatch.setattr("nnsight_engine.vllm_backend.engines.deliver_payloads", lambda *_: None)
    host = AsyncEngine({})
    requests = TraceRequests("key")
    requests.add({"steps": outputs()}, SamplingParams(), TraceEntry("key", 0, 1, b"", [], sandbox_of=None))
    try:
        with pytest.raises(KeyboardInterrupt):
            host.run_trace(requests)
        wait_for(lambda: inner.forgotten)
    finally:
        host._end_loop()
    assert (inner.num_running, inner.forgotten, inner.aborted) == (0, ["key"], requests.ids)


def test_a_trace_whose_requests_fail_is_dropped(host: SyncEngine, core: PlayedCore) -> None:
    calls: list[tuple[Any, ...]] = []

    def call(method: str, args: tuple[Any, ...]) -> list[bytes]:
        calls.append((method, args[0]))
        return [b"results"]

    cast(Any, host.inner).collective_rpc = call
    requests = TraceRequests("key")
    params = SamplingParams(detokenize=False, max_tokens=1)
    requests.add({"prompt_token_ids": [7]}, params, TraceEntry("key", 0, 1, b"", [], sandbox_of=None))
    data, (output,) = host.run_trace(requests)
    assert (data, output.outputs[0].token_ids) == (b"results", [7])
    core.before_step = raises(RuntimeError("a step failed"))
    with pytest.raises(RuntimeError, match="a step failed"):
        host.run_trace(requests)
    assert calls == [("collect_trace", "key"), ("drop_trace", "key")]


@pytest.mark.parametrize("failing", ["outline_model", "describe_traces", "spec"])
def test_an_engine_whose_model_cannot_be_described_is_shut_down(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    def call(method: str, *_: Any) -> list[Any]:
        if method == failing:
            raise KeyboardInterrupt
        return [[("", "LlamaForCausalLM", "", "")] if method == "outline_model" else {}]

    host = SimpleNamespace(inner=object(), call=call, close=lambda: closed.append(True))
    monkeypatch.setattr(engine_start, "start", lambda *_, **__: host)
    model = VLLM("some-model")
    with pytest.raises((KeyboardInterrupt, Exception)):
        model.dispatch()
    assert closed
    assert not model.dispatched
    assert "host" not in model.__dict__


def test_an_engine_that_is_started_anew_has_the_named_edits_again() -> None:
    def edit(name: str, data: bytes) -> EngineEdit:
        return EngineEdit(name, data, digest_of(data), is_resident=True)

    def engine(kept: dict[str, bytes]) -> Any:
        def call_workers(method: str, name: str, *data: bytes) -> None:
            kept.pop(name) if method == "remove_edit" else kept.update({name: data[0]})

        return SimpleNamespace(dispatched=True, call_workers=call_workers)

    first, second = dict[str, bytes](), dict[str, bytes]()
    book = EditBook()
    for name, data in (("calm", b"block"), ("wild", b"other")):
        book.add(engine(first), edit(name, data))
    book.install(engine(second))
    assert second == first == {"calm": b"block", "wild": b"other"}
    mine, copied = (Edits(book, [edit("calm", b"block")]) for _ in range(2))
    assert [one.name for one in mine.chosen("calm")] == ["calm"], "each edit once"
    mine.remove(engine(second), "calm")
    assert mine.chosen(None) == []
    assert second == {"wild": b"other"}
    with pytest.raises(ValueError, match="no edit 'calm'; the engine keeps 'wild'"):
        copied.chosen(None)
    book.add(engine(second), edit("calm", b"another"))
    with pytest.raises(ValueError, match="was replaced by another one of that name"):
        copied.chosen(None)
    with pytest.raises(TypeError, match="by name"):
        copied.chosen([7])
