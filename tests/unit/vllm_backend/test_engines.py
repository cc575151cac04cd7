"""The engines behind ``VLLM``: interrupts, starts that fail, edits that they keep."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from nnsight_engine.vllm_backend import engine_start
from nnsight_engine.vllm_backend.edits import EditBook, Edits, EngineEdit
from nnsight_engine.vllm_backend.engines import AsyncEngine
from nnsight_engine.vllm_backend.running_trace import TraceRequests
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.edit_store import digest_of
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.unit.vllm_backend.scripted_engine import Engine
from tests.waiting import wait_for


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
