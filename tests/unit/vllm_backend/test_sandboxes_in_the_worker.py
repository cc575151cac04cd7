"""Sandboxed traces on the worker: which code needs a sandbox, and the threads of a confined process."""

from __future__ import annotations

import builtins
import threading
import time
import types
from typing import Any

import msgspec
import pytest
import torch

from api_schemas.operations import Trace
from nnsight_engine.interleaving.call_stacks import Done
from nnsight_engine.interleaving.threads import Threads, TimeBudgetError
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.trace_code import encoded_code
from nnsight_engine.vllm_backend.traces.block_adapters import BlockAdapters, block_adapters
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.edit_store import EditStore
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.remote_modules import described, tree
from nnsight_engine.vllm_backend.traces.reporting import Reporting
from nnsight_engine.vllm_backend.traces.sandboxed.offered_values import Changes
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_main import WaitingThreads
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import SandboxPool
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher
from nnsight_engine.vllm_backend.traces.trace_store import TraceStore
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces


def test_untrusted_code_never_runs_in_the_worker_whatever_its_limits_say() -> None:
    """Even if the server marks a block as untrusted where no process is to be had."""
    traces: Any = WorkerTraces.__new__(WorkerTraces)
    traces.sandboxes = SandboxPool(TraceDispatcher(), EngineLimits(sandbox="off"))
    traces.edits = EditStore(1, 1)
    traces.store = TraceStore(traces.sandboxes, Reporting(), Threads(1.0), 1)
    traces._ended, traces._num_arrived = [], 0
    code = "exec('import builtins; builtins.ran = True')"
    entry = TraceEntry(
        "key", 0, 1, encoded_code(Trace(op="trace", code=code), "test"), [{}], sandbox_of="acme"
    )
    traces._arrive("own", entry.to_plain())
    assert traces._ended == ["own"]
    assert isinstance(traces.store.members["own"].error, SandboxUnavailableError)
    assert not hasattr(builtins, "ran")


def test_code_is_not_trusted_by_omission() -> None:
    plain = TraceEntry("key", 0, 1, b"", [{}], sandbox_of=None).to_plain()
    assert TraceEntry.from_plain(plain).sandbox_of is None
    with pytest.raises(msgspec.ValidationError, match="sandbox_of"):
        TraceEntry.from_plain({name: value for name, value in plain.items() if name != "sandbox_of"})
    with pytest.raises(msgspec.ValidationError, match="sandbox_of"):
        TraceEntry.from_plain({**plain, "sandbox_of": ""})
    request = TraceRequest(TraceHead(model="m", dialect="vllm"), [b"blocks"])
    with pytest.raises(AttributeError, match="sandbox_of"):
        _ = request.sandbox_of


def test_a_sandbox_starts_beside_a_model_with_adapters_and_has_none_of_its_own() -> None:
    """Its stand-ins raise for what only the worker's modules have."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.lora_manager = types.SimpleNamespace(block_adapters=BlockAdapters())
    assert block_adapters(model) is model.lora_manager.block_adapters
    stand_in = tree(described(model), SandboxedError.attribute, {})
    with pytest.raises(SandboxedError, match="lora_manager"):
        _ = stand_in.lora_manager
    assert block_adapters(stand_in).slot() is None


def test_a_step_is_charged_for_its_own_wait_only() -> None:
    """With several ranks a step without sandboxes does not begin with a new budget."""
    pool = SandboxPool(TraceDispatcher(), EngineLimits())
    pool._waiting.waited_s = 0.5
    assert pool.end_step() == ([], {}, 0.5)
    assert pool.end_step() == ([], {}, 0.0)


def test_changes_that_are_too_many_to_keep_are_dropped_until_the_next_step() -> None:
    changes = Changes(100)
    changes.keep("a", [], memoryview(bytes(60)))
    assert list(changes.by_place) == ["a"]
    changes.keep("b", [], memoryview(bytes(60)))
    assert (changes.is_too_much, list(changes.by_place)) == (True, [])
    changes.clear()
    changes.keep("c", [], memoryview(bytes(60)))
    assert (changes.is_too_much, list(changes.by_place)) == (False, ["c"])


def test_a_job_inside_c_code_is_waited_for_and_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = WaitingThreads(budget_s=0.1, count=1)
    ended = threading.Event()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def job() -> None:
        try:
            sum(range(6 * 10**7))  # one call, which nothing interrupts
        finally:
            ended.set()

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = threads.take_stack().start(job)
    assert isinstance(done, Done)
    assert isinstance(done.error, TimeBudgetError)
    assert ended.is_set()


def test_a_block_that_waits_for_a_processor_is_not_late_and_one_that_computes_is() -> None:
    def compute() -> None:
        while True:
            pass

    waiting = WaitingThreads(budget_s=0.2, count=1).take_stack()
    assert waiting.start(lambda: time.sleep(0.5)).empty() == (None, None)  # others compute meanwhile
    _, error = WaitingThreads(budget_s=0.2, count=1).take_stack().start(compute).empty()
    assert isinstance(error, TimeBudgetError)
