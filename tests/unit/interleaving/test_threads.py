"""Blocks on threads: the baton, the time limit, and what is left behind."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.interleaving.call_stacks import Done
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.threads import ThreadMediator, Threads, ThreadStack, TimeBudgetError


def run_one(block: Callable[[ThreadMediator], Any], budget_s: float = 5.0, **values: Any) -> Interleaver:
    """Run a block beside a model that provides ``values``."""
    mediator: ThreadMediator = ThreadMediator(lambda: block(mediator), None, Threads(budget_s), seed=1)
    interleaver = Interleaver([mediator])

    def model() -> None:
        for name, value in values.items():
            interleaver.handle(name, value, iterate=True)

    interleaver.run(model)
    return interleaver


def test_the_baton_goes_back_and_forth() -> None:
    stack = ThreadStack(5.0)

    def job() -> str:
        return f"{stack.hand_over('first')} {stack.hand_over('second')}"

    assert stack.start(job) == "first"
    assert stack.resume("one") == "second"
    done = stack.resume("two")
    assert type(done) is Done
    assert done.empty() == ("one two", None)


def test_a_block_reads_and_writes_from_its_thread() -> None:
    seen: list[Any] = []

    def block(mediator: ThreadMediator) -> None:
        seen.append((mediator.request("a.i0"), threading.current_thread() is threading.main_thread()))
        mediator.swap("b.i0", 3)
        seen.append(mediator.request("b.i0"))

    run_one(block, a=1, b=2)
    assert seen == [(1, False), 3]


def test_errors_come_out_where_the_model_runs() -> None:
    def block(mediator: ThreadMediator) -> None:
        mediator.request("a.i0")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_one(block, a=1)


def test_a_block_that_computes_for_ever_is_stopped() -> None:
    ended = threading.Event()

    def block(mediator: ThreadMediator) -> None:
        mediator.request("a.i0")
        try:
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(TimeBudgetError, match=r"0\.2 s"):
        run_one(block, 0.2, a=1)
    assert ended.wait(50)


def test_a_sleeping_block_is_abandoned_without_harm() -> None:
    def block(mediator: ThreadMediator) -> None:
        mediator.request("a.i0")
        time.sleep(3600)

    with pytest.raises(TimeBudgetError):
        run_one(block, 0.1, a=1)
    called: list[str] = []
    before = sys.gettrace()
    sys.settrace(lambda *_: None)  # functions would never begin, were the error still pending
    try:
        called.extend(str(number) for number in range(3))
    finally:
        sys.settrace(before)
    assert called == ["0", "1", "2"]


def test_random_numbers_are_the_blocks_own() -> None:
    drawn: list[tuple[list[float], float]] = []

    def draw() -> tuple[list[float], float]:
        return torch.randn(2).tolist(), float(np.random.rand())

    def block(mediator: ThreadMediator) -> None:
        drawn.append(draw())
        mediator.request("a.i0")
        drawn.append(draw())

    def run_seeded(seed: int) -> tuple[list[float], float]:
        torch.manual_seed(seed)
        np.random.seed(seed)
        run_one(block, a=1)
        return draw()

    after = run_seeded(0)
    torch.manual_seed(0)
    np.random.seed(0)
    assert after == draw()  # as if no block had drawn
    run_seeded(7)
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


def test_a_block_works_on_the_models_stream_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands for torch's: streams are only where there is a device. Threads that earlier blocks left waiting
    # may end meanwhile, and ask too; a new thread may have the number of one that ended, so count by thread.
    taken: list[tuple[threading.Thread, str]] = []
    of_model = "first"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: of_model)
    monkeypatch.setattr(
        torch.cuda, "set_stream", lambda stream: taken.append((threading.current_thread(), stream))
    )
    stack = ThreadStack(1.0)
    thread = stack.start(lambda: stack.hand_over(threading.current_thread()))
    of_model = "second"
    stack.resume(None)
    assert thread is not threading.current_thread()
    assert [stream for other, stream in taken if other is thread] == ["first", "second"]


class _LateLock:
    """A lock that a job releases just after the time for it has run out."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._num_waits = 0

    def acquire(self, timeout: float) -> bool:
        self._num_waits += 1
        if self._num_waits == 1:
            return bool(self._lock.acquire(timeout=timeout))
        self._lock.acquire(timeout=10)
        return False

    def release(self) -> None:
        self._lock.release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_hands_over_when_it_is_being_abandoned_ends() -> None:
    stack = ThreadStack(0.05)
    late = _LateLock(stack._to_caller)  # noqa: SLF001 - a lock alone can be late
    stack._to_caller = late  # type: ignore[assignment] # noqa: SLF001 - it has the methods that are called
    threads: list[threading.Thread] = []

    def job() -> None:
        threads.append(threading.current_thread())
        try:
            while True:
                time.sleep(0.01)
        except TimeBudgetError:
            stack.hand_over("late")

    _, error = stack.start(job).empty()
    assert isinstance(error, TimeBudgetError)
    threads[0].join(60)
    assert not threads[0].is_alive()
