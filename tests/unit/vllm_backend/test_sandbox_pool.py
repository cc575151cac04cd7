"""The pool of sandboxed traces, with a session that is played: the engine never waits for a process here."""

from __future__ import annotations

import builtins
from typing import Any

import msgspec
import pytest

from api_schemas.request_traces import Trace
from nnsight_engine.interleaving.threads import Threads
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.request_code import encoded_code
from nnsight_engine.vllm_backend.traces.edits import EditStore
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.reporting import Reporting
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import SandboxPool
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher
from nnsight_engine.vllm_backend.traces.trace_store import TraceStore
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces


class PlayedSession:
    """A session whose process has not answered."""

    has_collected = False


def test_a_trace_whose_process_has_not_answered_cannot_be_collected() -> None:
    pool: Any = SandboxPool(TraceDispatcher(), EngineLimits())
    pool._by_key["key"] = PlayedSession()
    with pytest.raises(RuntimeError, match="poll `finish_trace`"):
        pool.collect("key")
    assert pool.knows("key")


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
