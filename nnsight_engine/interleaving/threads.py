"""Blocks on threads of their own, which take turns with the model's by passing a baton.

Within one trace that runs from beginning to end, greenlets are better (see ``stacks``): a hand-over is a
switch. A serving engine is different. Its blocks live over many calls into the engine, at whatever depth of
the C stack each of them stands, which greenlets that torch's stack walk must survive cannot do. And they are
other people's code beside requests that never asked for it: one that does not come back must be left behind.

So here a block has a thread. Whoever hands it the baton waits, with a limit on the time that the block may
take. Over it, ``TimeBudgetError`` is raised in the block, wherever it is; one that does not even listen to
that keeps its thread and never gets the baton again, while the model goes on.

The model's own thread is never interrupted: the error can only hit code that runs on the block's thread.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import weakref
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from nnsight_engine.interleaving.events import Events
from nnsight_engine.interleaving.mediator import Mediator, Modes, Raise, named
from nnsight_engine.interleaving.stacks import Done
from nnsight_engine.interleaving.streams import RandomStreams

_GRACE_S = 0.5
"""How long an interrupted block may take to clean up."""

_LONG_ENOUGH = 1000

_NUM_SPARE = 4
"""Threads that wait for a job."""

_ONE_MORE = "one more"

_numbers = itertools.count()


class TimeBudgetError(Exception):
    """A block computed longer than a step may wait for it."""


class _Errand:
    """Something that the model's thread is to do for a block, which waits for it and nothing else."""

    __slots__ = ("act",)

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def answer(self) -> Any:
        """Do it; returns the block's answer."""
        try:
            return self.act()
        except Exception as error:  # noqa: BLE001 - raised in the block, at the line that asks
            return Raise(error)


class ThreadStack:
    """A thread for one job, and the baton between it and whoever resumes it.

    Attributes:
        left_s: Seconds that the job may still run in this step; whoever drives the steps sets it.
        abandoned: Whether the job was left behind.
    """

    __slots__ = ("_given", "_handed", "_stream", "_there", "_thread", "abandoned", "budget_s", "left_s")

    def __init__(self, budget_s: float) -> None:
        """Prepare; nothing runs before ``start``."""
        self.budget_s = self.left_s = budget_s
        self.abandoned = False
        self._given: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._handed = allocate_lock()
        self._there = allocate_lock()
        self._handed.acquire()
        self._there.acquire()
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Let the thread begin, and wait for its job: a new thread takes a while to be there."""
        name = f"nnsight-engine-block-{next(_numbers)}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], Any]) -> Any:
        """Run ``job`` until it first hands over; returns what it does."""
        if self._thread is None:
            self.prepare()
        return self.resume(job)

    def resume(self, payload: Any) -> Any:
        """Hand ``payload`` over and return what comes back."""
        self._given = payload
        # A thread has a current stream of its own, and work on it would be in no order with the model's.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._handed.release()
        return self._wait()

    def hand_over(self, event: Any) -> Any:
        """Give the baton away, from within the job, and return what it comes back with."""
        self._give(event)
        self._take_over()
        if self.abandoned:
            raise SystemExit
        given, self._given = self._given, None
        return given

    def is_current(self) -> bool:
        """Tell whether this code runs within the job."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        self._take_over()
        job, self._given = self._given, None
        try:
            done = Done(job())
        except BaseException as error:  # noqa: BLE001 - raised by whoever gave the job
            done = Done(error=error)
        self._give(done)

    def _take_over(self) -> None:
        """Wait for the baton, and go on with whoever gave it on the same stream of the device."""
        self._handed.acquire()
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def _give(self, event: Any) -> None:
        if self.abandoned:
            raise SystemExit
        self._given = event
        self._there.release()

    def _wait(self) -> Any:
        if not self._comes_back():
            return Done(error=self._interrupted())
        given, self._given = self._given, None
        return given

    @staticmethod
    def clock() -> float:
        """Tell the seconds that count of those in which the job runs."""
        return time.monotonic()

    def _comes_back(self) -> bool:
        """Wait for the baton for as long as the job may run; returns whether it came."""
        begin = self.clock()
        came = self._there.acquire(timeout=max(self.left_s, 0.0))
        self.left_s -= self.clock() - begin
        return came

    def _interrupted(self) -> TimeBudgetError:
        """Stop the job, or leave it behind."""
        message = (
            f"The block ran longer than {self.budget_s:g} s within one step of the engine, which others "
            "share. Save less, compute after the trace, or raise the engine's time budget."
        )
        assert self._thread is not None  # noqa: S101 - it has started
        _raise_in(self._thread, TimeBudgetError)
        came_back = self._there.acquire(timeout=_GRACE_S)
        self.abandoned = True
        if not came_back:
            _take_back(self._thread)
        if came_back and type(self._given) is not Done:
            self._handed.release()  # it asks for more; it is told to end
        self._given = None
        return TimeBudgetError(message)


_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Let ``error`` be raised on a thread, before its next instruction in Python."""
    assert thread.ident is not None  # noqa: S101 - it has started
    _set_async_exc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))


def _take_back(thread: threading.Thread) -> None:
    """Withdraw an error that a thread, waiting outside of Python, has not heard of.

    While one is pending, the interpreter keeps a flag up for all threads, and on Python 3.11 a function that
    is called while a trace function is set never begins: it looks at the flag for ever. Only a thread that
    an error is raised on takes the flag down, so one is raised on a thread made for it.
    """
    assert thread.ident is not None  # noqa: S101 - it has started
    _set_async_exc(ctypes.c_ulong(thread.ident), None)
    other = threading.Thread(target=_take_flag_down, daemon=True)
    other.start()
    other.join()


def _take_flag_down() -> None:
    try:
        _raise_in(threading.current_thread(), TimeBudgetError)
        for _ in range(_LONG_ENOUGH):  # it is raised at a turn of a loop
            pass
    except TimeBudgetError:
        return


class Threads:
    """The kind of stack that a ``ThreadMediator`` runs on.

    A thread has one job, so that nothing of a block is left on it for the next one. Some are kept waiting.

    Args:
        budget_s: Seconds that one block may compute within one step.
    """

    def __init__(self, budget_s: float) -> None:
        """Keep the limit."""
        self.budget_s = budget_s
        self._spare: deque[ThreadStack] = deque()
        self._wanted: SimpleQueue[str | None] = SimpleQueue()
        self._keeper: threading.Thread | None = None

    def take(self) -> ThreadStack:
        """Return a thread without a job."""
        if self._keeper is None:
            self._keeper = threading.Thread(
                target=_keep_spare, args=(self.budget_s, self._spare, self._wanted), daemon=True
            )
            self._keeper.start()
            weakref.finalize(self, self._wanted.put, None)
        try:
            stack = self._spare.popleft()
        except IndexError:
            stack = ThreadStack(self.budget_s)
        self._wanted.put(_ONE_MORE)
        return stack

    def start(self, stack: ThreadStack, job: Callable[[], Any]) -> Any:
        """Give it a job; returns what it first hands over."""
        return _after_errands(stack, stack.start(job))

    def resume(self, stack: ThreadStack, payload: Any) -> Any:
        """Hand it what it waits for; returns what it hands over next."""
        return _after_errands(stack, stack.resume(payload))

    def run(self, job: Callable[[], Any]) -> Any:
        """Return what a job returns that hands nothing over.

        Raises:
            Exception: What it raises; what would end a program becomes a RuntimeError.
        """
        result, error = self.take().start(job).empty()
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise RuntimeError(f"this raised {type(error).__name__}: {error}") from error
        return result

    def give_back(self, stack: ThreadStack) -> None:
        """Let the thread end, which its job's end does."""


def _keep_spare(budget_s: float, spare: deque[ThreadStack], wanted: SimpleQueue[str | None]) -> None:
    """Have threads wait for jobs; on a thread of its own, since nobody is to wait for one to be there."""
    while wanted.get() is not None:
        while len(spare) < _NUM_SPARE:
            stack = ThreadStack(budget_s)
            stack.prepare()
            spare.append(stack)
    for stack in spare:
        stack.start(_do_nothing)


def _do_nothing() -> None:
    """Let a thread that waits for a job end."""


def _after_errands(stack: ThreadStack, event: Any) -> Any:
    """Run a job's errands, on the calling thread and the job's time; returns what it hands over then."""
    while type(event) is _Errand:
        begin = stack.clock()
        answer = event.answer()
        stack.left_s -= stack.clock() - begin
        event = stack.resume(answer)
    return event


class _OwnModes:
    """A thread has modes of its own, so there is nothing to keep apart."""

    __slots__ = ()

    def enter(self) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""


class ThreadMediator(Mediator):
    """A block on a thread of its own.

    What it draws at random comes from streams of its own: it neither sees nor disturbs the model's.

    Attributes:
        spent_s: Seconds for which the model has waited for it, all steps together.
    """

    __slots__ = ("_random", "runs_on", "spent_s")

    def __init__(self, intervention: Callable[[], Any], info: Any, threads: Threads, *, seed: int) -> None:
        """Prepare a block; nothing runs before ``start``."""
        super().__init__(intervention, info)
        self.runs_on = threads  # type: ignore[misc] # one engine's, where a class has one for all
        self._random = RandomStreams(seed)
        self.spent_s = 0.0

    def refill(self) -> None:
        """Let the block compute for as long as one step allows."""
        worker: ThreadStack | None = self.worker
        if worker is not None:
            worker.left_s = worker.budget_s

    def _new_modes(self) -> Modes:
        return _OwnModes()

    def _go_on(self, how: Callable[[Any, Any], Any], payload: Any) -> Any:
        begin = time.monotonic()
        self._random.exchange()
        try:
            return super()._go_on(how, payload)
        finally:
            self._random.exchange()
            self.spent_s += time.monotonic() - begin

    def ask(self, kind: Events, provider: str, iteration: int | None = None, more: Any = None) -> Any:
        """Hand an event over and return the answer, see ``Mediator``."""
        return self._handed_over((kind, provider, iteration, more), provider, iteration)

    def on_models_thread(self, act: Callable[[], Any], what: str) -> Any:
        """Have the model's thread do something now, and return its result.

        Args:
            act: What to do.
            what: What it is called in messages.

        Raises:
            ValueError: The code that asks is not this block's.
        """
        return self._handed_over(_Errand(act), what)

    def _handed_over(self, event: Any, what: str, iteration: int | None = None) -> Any:
        worker: ThreadStack | None = self.worker
        if worker is None or not worker.is_current():
            assert self.interleaver is not None  # noqa: S101 - a started block has one
            raise self.interleaver.foreign(named(what, iteration))
        answer = worker.hand_over(event)
        if type(answer) is Raise:
            raise answer.error
        return answer
