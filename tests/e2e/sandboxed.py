"""Traces of ``VLLM`` whose blocks run in sandbox processes, as the server has them for untrusted keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
from vllm import RequestOutput

from nnsight_engine.remote_backend.values.outcomes import Outcome
from nnsight_engine.vllm_backend.rpc_results import common_result
from nnsight_engine.vllm_backend.running_trace import TraceRequests
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import RequestTracer, SentTrace
from tests.e2e.traces import finished
from tests.waiting import wait_for

_START_S: Final = 300


def started(model: VLLM) -> int:
    """Return how many traces have been given a sandbox process."""
    counts: int = common_result(model.host.call("count_events"))["sandboxes"]["started"]
    return counts


def _send(tracer: RequestTracer, trace: SentTrace) -> tuple[list[Outcome], list[RequestOutput]]:
    host: Any = tracer.model.host
    try:
        outputs = host.run(trace.prompts, trace.params)
        return finished(tracer.model, trace, outputs), outputs
    except BaseException:
        host.call("drop_trace", trace.key)
        raise


@contextlib.contextmanager
def in_sandboxes(model: VLLM) -> Iterator[None]:
    """Run all traces that are opened within the context in sandbox processes, and check that they did."""

    def is_ready() -> bool:
        is_there, failure = common_result(model.host.call("prepare_sandbox"))
        assert failure is None, failure
        return bool(is_there)

    wait_for(is_ready, _START_S)
    before = started(model)
    keys: set[str] = set()

    def add(trace: SentTrace, prompt: Any, params: Any, entry: TraceEntry, **options: Any) -> None:
        keys.add(entry.key)
        entry = msgspec.structs.replace(entry, sandbox_of="stranger")
        TraceRequests.add(trace, prompt, params, entry, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SentTrace, "add", add)
        patch.setattr(RequestTracer, "_send", _send)
        yield
    assert started(model) - before == len(keys) > 0
