"""vLLM's blocking engine behind ``VLLM``: interrupted and failing runs leave nothing, threads take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams

from nnsight_engine.vllm_backend.engines import SyncEngine
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.traces import live_objects

pytestmark = pytest.mark.e2e


@pytest.fixture
def host(renamed_model: VLLM) -> SyncEngine:
    assert isinstance(renamed_model.host, SyncEngine)
    return renamed_model.host


def run(host: SyncEngine, *lengths: int, n: int = 1) -> list[list[int]]:
    """Run a request for each length, and return the number of tokens of its choices."""
    params = [SamplingParams(n=n, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = host.run([{"prompt_token_ids": [length]} for length in lengths], params)
    assert [output.prompt_token_ids for output in outputs] == [[length] for length in lengths]
    return [[len(choice.token_ids) for choice in output.outputs] for output in outputs]


def fail_once(patch: pytest.MonkeyPatch, core: Any, method: str, error: BaseException) -> None:
    """Have the second call of a method of the engine's core raise an error."""
    inner: Callable[..., Any] = getattr(core, method)
    calls = iter(range(10**6))

    def call(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise error
        return inner(*arguments)

    patch.setattr(core, method, call)


def test_outputs_are_in_the_order_of_the_prompts(host: SyncEngine) -> None:
    lengths = [5, 1, 4, 2, 3]  # they end in another order
    assert run(host, *lengths, n=2) == [[length] * 2 for length in lengths]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("a step failed"), SystemExit(1)], ids=repr
)
@pytest.mark.parametrize("where", ["get_output", "add_request"])
@pytest.mark.parametrize("n", [1, 3])
def test_requests_of_a_run_that_did_not_end_are_aborted(
    host: SyncEngine, error: BaseException, where: str, n: int
) -> None:
    engine = host.inner.llm_engine
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, engine.engine_core, where, error)
        with pytest.raises(type(error)):
            run(host, 7, 8, 9, n=n)
    assert not engine.has_unfinished_requests()
    assert not engine.output_processor.parent_requests
    assert run(host, 2) == [[2]]


def test_threads_take_turns_and_each_has_its_own_outputs(host: SyncEngine) -> None:
    found: dict[int, list[list[list[int]]]] = {}

    def work(length: int) -> None:
        found[length] = [run(host, length, 10 + length) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(length,)) for length in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {length: [[[length], [10 + length]]] * 3 for length in range(1, 5)}


def test_a_trace_whose_requests_fail_is_dropped(renamed_model: VLLM, host: SyncEngine) -> None:
    core = host.inner.llm_engine.engine_core
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, core, "get_output", RuntimeError("a step failed"))
        with (
            pytest.raises(RuntimeError, match="a step failed"),
            renamed_model.trace([3, 4], max_tokens=4) as tracer,
            tracer.all(),
        ):
            renamed_model.logits.save()
    run(host, 1)  # workers hear of a request's end with the next step
    assert not live_objects(renamed_model)
