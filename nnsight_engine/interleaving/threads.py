"""Blocks on threads of their own that take turns with the model's thread; one of them has control at a time.

Greenlets (see ``call_stacks``) do not fit a serving engine. Its blocks live across many calls into the
engine, each from a different depth of the C stack, which is unsafe under torch's stack walk. And they run
beside other tenants' requests, which must not wait for ever.

So the side that hands over control waits with a limit. When it is exceeded, ``TimeBudgetError`` is raised in
the block, wherever it is. A block that does not react keeps its thread but never gets control again, and the
model continues. The model's own thread is never interrupted.
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

from nnsight_engine.interleaving.call_stacks import Done
from nnsight_engine.interleaving.events import Events
from nnsight_engine.interleaving.mediator import Mediator, Modes, Raise, named
from nnsight_engine.interleaving.thread_state import RandomStreams, compute_on_one_thread

_GRACE_S = 0.5
"""Seconds that an interrupted block has for cleaning up."""

_CLEAR_ITERATIONS = 1000

_NUM_SPARE = 4
"""Number of idle threads that are kept ready."""

_ONE_MORE = "one more"

_numbers = itertools.count()


class TimeBudgetError(Exception):
    """A block computed longer than the time budget of one step."""


class _ModelThreadCall:
    __slots__ = ("act",)

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def answer(self) -> Any:
        """Make the call, on the model's thread; an error is raised in the block."""
        try:
            return self.act()
        except Exception as error:  # noqa: BLE001 - raised in the block, at the line that asks
            return Raise(error)


class ThreadStack:
    """A thread for one job, and the hand-over of control between it and its caller, which resumes it.

    One of the two runs: releasing ``_to_job`` or ``_to_caller`` passes control, with the payload. ``left_s``:
    seconds that the job may still run in this step; the driver of the steps resets it.
    """

    __slots__ = ("_payload", "_stream", "_thread", "_to_caller", "_to_job", "abandoned", "budget_s", "left_s")

    grace_s = _GRACE_S
    """Seconds for an interrupted job to come back before it is abandoned; -1 to wait for it however long."""

    def __init__(self, budget_s: float) -> None:
        """Create a stack without its thread; ``budget_s``: seconds that its job may run in one step."""
        self.budget_s = self.left_s = budget_s
        self.abandoned = False
        self._payload: Any = None
        self._stream: torch.cuda.Stream | None = None
        # Both are held except while control passes: to acquire one is to wait for control.
        self._to_job = allocate_lock()
        self._to_caller = allocate_lock()
        self._to_job.acquire()
        self._to_caller.acquire()
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        name = f"nnsight-engine-block-{next(_numbers)}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], Any]) -> Any:
        if self._thread is None:
            self.prepare()
        return self.resume(job)

    def resume(self, payload: Any) -> Any:
        """Pass control and ``payload`` to the job; return what it hands over, an error if it is too slow."""
        self._payload = payload
        # Each thread has a current stream of its own, and work on it would not be ordered with the model's.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._to_job.release()
        if not self._wait_for_control():
            return Done(error=self._interrupt())
        event, self._payload = self._payload, None
        return event

    def hand_over(self, event: Any) -> Any:
        """Pass ``event`` to the caller, from the job's thread; return the answer when there is one."""
        self._hand_to_caller(event)
        self._await_control()
        if self.abandoned:
            raise SystemExit
        answer, self._payload = self._payload, None
        return answer

    def is_current(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def _run(self) -> None:
        """The thread's code: wait for the job, run it, and hand its ``Done`` over."""
        torch.set_grad_enabled(False)
        compute_on_one_thread()
        self._await_control()
        job, self._payload = self._payload, None
        try:
            done = Done(job())
        except BaseException as error:  # noqa: BLE001 - raised by the caller that gave the job
            done = Done(error=error)
        self._hand_to_caller(done)

    def _await_control(self) -> None:
        """Wait for control, and use the same device stream as the thread that handed over."""
        self._to_job.acquire()
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def _hand_to_caller(self, event: Any) -> None:
        """Pass control and ``event`` to the caller; end the thread if it no longer listens."""
        if self.abandoned:
            raise SystemExit
        self._payload = event
        self._to_caller.release()

    @staticmethod
    def clock() -> float:
        return time.monotonic()

    def _wait_for_control(self) -> bool:
        """Wait for the job as long as it may still run in this step; return whether it has handed over."""
        begin = self.clock()
        came = self._to_caller.acquire(timeout=max(self.left_s, 0.0))
        self.left_s -= self.clock() - begin
        return came

    def _interrupt(self) -> TimeBudgetError:
        """Raise an error in the job and wait for it; afterwards it never gets control again, only its end."""
        message = (
            f"The block ran longer than {self.budget_s:g} s within one step of the engine, which others "
            "share. Save less, compute after the trace, or raise the engine's time budget."
        )
        assert self._thread is not None  # noqa: S101 - it has started
        _raise_in(self._thread, TimeBudgetError)
        came_back = self._to_caller.acquire(timeout=self.grace_s)
        self.abandoned = True
        if not came_back:
            _withdraw_error(self._thread)
        # It may have made, or make now, another request: it is resumed, and ends (see ``hand_over``).
        self._to_job.release()
        self._payload = None
        return TimeBudgetError(message)


_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise ``error`` on a thread, before its next Python instruction."""
    assert thread.ident is not None  # noqa: S101 - it has started
    _set_async_exc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))


def _withdraw_error(thread: threading.Thread) -> None:
    """Withdraw an error that was not raised yet, because the thread is blocked outside of Python.

    A pending error keeps a flag set for all threads; on Python 3.11 a function called while a trace function
    is set then checks it forever. Only raising an error clears it, so one is raised on a thread made for this
    purpose.
    """
    assert thread.ident is not None  # noqa: S101 - it has started
    _set_async_exc(ctypes.c_ulong(thread.ident), None)
    other = threading.Thread(target=_clear_stop_flag, daemon=True)
    other.start()
    other.join()


def _clear_stop_flag() -> None:
    """Raise an error on this thread, which clears the flag of pending errors; see ``_withdraw_error``."""
    try:
        _raise_in(threading.current_thread(), TimeBudgetError)
        for _ in range(_CLEAR_ITERATIONS):  # it is raised at an iteration of a loop
            pass
    except TimeBudgetError:
        return


class Threads:
    """The kind of stack that a ``ThreadMediator`` runs on; ``budget_s`` is for one block in one step.

    A thread runs one job only, so that no thread-local state is left for the next.
    """

    def __init__(self, budget_s: float) -> None:
        """Start no thread yet; ``_orders`` gets a message for each spare thread to make, None at the end."""
        self.budget_s = budget_s
        self._spare: deque[ThreadStack] = deque()
        self._orders: SimpleQueue[str | None] = SimpleQueue()
        self._keeper: threading.Thread | None = None

    def take_stack(self) -> ThreadStack:
        """Return a thread that is ready for a job, and order another one from the keeper."""
        if self._keeper is None:
            self._keeper = threading.Thread(
                target=_keep_spare, args=(self.budget_s, self._spare, self._orders), daemon=True
            )
            self._keeper.start()
            weakref.finalize(self, self._orders.put, None)
        try:
            stack = self._spare.popleft()
        except IndexError:
            stack = ThreadStack(self.budget_s)
        self._orders.put(_ONE_MORE)
        return stack

    def start(self, stack: ThreadStack, job: Callable[[], Any]) -> Any:
        return _serve_calls(stack, stack.start(job))

    def resume(self, stack: ThreadStack, payload: Any) -> Any:
        return _serve_calls(stack, stack.resume(payload))

    def run(self, job: Callable[[], Any]) -> Any:
        """Return the result of a job without hand-overs; its BaseException becomes a RuntimeError."""
        result, error = self.take_stack().start(job).empty()
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise RuntimeError(f"this raised {type(error).__name__}: {error}") from error
        return result

    def give_back(self, stack: ThreadStack) -> None:
        """Do nothing: the thread ends with its job."""


def _keep_spare(budget_s: float, spare: deque[ThreadStack], orders: SimpleQueue[str | None]) -> None:
    """Keep idle threads ready, on a thread of its own, so that no block waits for one; None ends them."""
    while orders.get() is not None:
        while len(spare) < _NUM_SPARE:
            stack = ThreadStack(budget_s)
            stack.prepare()
            spare.append(stack)
    for stack in spare:
        stack.start(_do_nothing)


def _do_nothing() -> None:
    """End an idle thread: the job of threads that are no longer needed."""


def _serve_calls(stack: ThreadStack, event: Any) -> Any:
    """Make the calls that a job asks for, on the model's thread; return what it hands over after them."""
    while type(event) is _ModelThreadCall:
        begin = stack.clock()
        answer = event.answer()
        stack.left_s -= stack.clock() - begin
        event = stack.resume(answer)
    return event


class _OwnModes:
    """Modes of a block on a thread of its own: modes are thread-local, so there is nothing to keep apart."""

    __slots__ = ()

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class ThreadMediator(Mediator):
    """A block on a thread of its own, with its own random streams: it neither sees nor affects the model's.

    ``spent_s``: seconds for which the model has waited for the block, in all steps together.
    """

    __slots__ = ("_random", "runs_on", "spent_s")

    def __init__(
        self,
        intervention: Callable[[], Any],
        info: Any,
        threads: Threads,
        *,
        seed: int,
        name: str | None = None,
    ) -> None:
        """Prepare a block that runs on one of ``threads``; ``seed`` is that of its random streams."""
        super().__init__(intervention, info, name)
        self.runs_on = threads  # type: ignore[misc] # one per engine; the base class has one for all
        self._random = RandomStreams(seed)
        self.spent_s = 0.0

    def refill(self) -> None:
        worker: ThreadStack | None = self.worker
        if worker is not None:
            worker.left_s = worker.budget_s

    def _new_modes(self) -> Modes:
        return _OwnModes()

    def _run_block(self, switch: Callable[[Any, Any], Any], payload: Any) -> Any:
        """Run the block with its own random streams, and add the time to ``spent_s``."""
        begin = time.monotonic()
        self._random.exchange()
        try:
            return super()._run_block(switch, payload)
        finally:
            self._random.exchange()
            self.spent_s += time.monotonic() - begin

    def send_event(self, kind: Events, provider: str, iteration: int | None = None, more: Any = None) -> Any:
        return self._handed_over((kind, provider, iteration, more), provider, iteration)

    def on_models_thread(self, act: Callable[[], Any], what: str) -> Any:
        """Call a function (``what`` in messages) on the model's thread; ValueError outside this block."""
        return self._handed_over(_ModelThreadCall(act), what)

    def _handed_over(self, event: Any, what: str, iteration: int | None = None) -> Any:
        """Hand an event over from the block's thread and return the answer; ``what`` is for the error."""
        worker: ThreadStack | None = self.worker
        if worker is None or not worker.is_current():
            assert self.interleaver is not None  # noqa: S101 - a started block has one
            raise self.interleaver.foreign_request_error(named(what, iteration))
        answer = worker.hand_over(event)
        if type(answer) is Raise:
            raise answer.error
        return answer
