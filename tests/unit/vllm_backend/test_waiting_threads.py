"""Threads of a confined process, which can start no others."""

from __future__ import annotations

import threading

import pytest

from nnsight_engine.interleaving.call_stacks import Done
from nnsight_engine.interleaving.threads import TimeBudgetError
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_main import WaitingThreads


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
    done = threads.take().start(job)
    assert isinstance(done, Done)
    assert isinstance(done.error, TimeBudgetError)
    assert ended.is_set()
