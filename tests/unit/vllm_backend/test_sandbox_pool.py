"""The pool of sandboxed traces, with a session that is played: the engine never waits for a process here."""

from __future__ import annotations

from typing import Any

import pytest

from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import SandboxPool
from nnsight_engine.vllm_backend.traces.stages.early_stage import EarlyStageTraces
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher


class PlayedSession:
    """A session whose process has not answered."""

    has_collected = False


def test_a_trace_whose_process_has_not_answered_cannot_be_collected() -> None:
    pool: Any = SandboxPool(TraceDispatcher(), EngineLimits())
    pool._by_key["key"] = PlayedSession()
    with pytest.raises(RuntimeError, match="poll `finish_trace`"):
        pool.collect("key")
    assert pool.knows("key")


def test_an_early_stage_has_no_results() -> None:
    traces = EarlyStageTraces.__new__(EarlyStageTraces)
    assert traces.collect("key", {}) == []
