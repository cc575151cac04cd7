"""The mediator of one block: the block asks for values, waits, and continues where it waited.

The block runs on a stack of its own. Each request is an *event* that it hands over; one side runs at a time.

A request for a call that the model has passed is known at once, since calls are counted: an
``OutOfOrderError``. If the call never happens, or other blocks never reach a barrier, this is known when the
run ends: a ``MissedProviderError``. Both are raised in the block, at the line that asks.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from greenlet import GreenletExit, getcurrent

from nnsight_engine.core.errors import IterationOver
from nnsight_engine.core.gradients import explain
from nnsight_engine.interleaving import call_stacks
from nnsight_engine.interleaving.batching import BatchGroup
from nnsight_engine.interleaving.events import (
    Cancelation,
    EarlyStopException,
    Events,
    MissedProviderError,
    OutOfOrderError,
    StepNotReachedError,
)
from nnsight_engine.interleaving.thread_state import ModeKeeper

if TYPE_CHECKING:
    from nnsight_engine.interleaving.interleaver import Interleaver
    from nnsight_engine.interleaving.shared_variables import Exchange

Event = tuple[Events, str, int | None, Any]
"""A request: kind, provider without its call number, call number, further arguments."""

NOTHING = object()
"""The absence of an answer: the block waits."""

_STOPPED = "the trace was stopped by its block"

_MAX_REFUSED = 500
"""Maximum number of consecutive requests that are answered with an error; beyond it the block has failed."""

_MAX_CLEANUP_REQUESTS = 16
"""Number of requests that a cancelled block may make while it cleans up, before ``GreenletExit`` is raised.
"""


class StackKind(Protocol):
    """The kind of stack that blocks run on, see ``call_stacks``; it takes turns with the model."""

    def take_stack(self) -> Any: ...

    def start(self, stack: Any, job: Callable[[], Any]) -> Any:
        """Start a job on the stack; return the first payload that it hands over."""

    def resume(self, stack: Any, payload: Any) -> Any:
        """Send the stack the answer that it waits for; return the payload that it hands over next."""

    def give_back(self, stack: Any) -> None: ...


class Modes(Protocol):
    """Keeps a block's torch modes apart from the model's, see ``thread_state``."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class Raise:
    """An answer that raises an error in the block, at the line that waits."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Mediator:
    """Runs one block and answers its requests.

    Attributes:
        batch_group: First row and number of rows that this block owns; None sees all rows.
        iteration: The call number for requests; None means the next call.
        loops: The loops over steps that the block is in, innermost last.
        moved_on: Whether the block set the call number itself, with ``next()``.
        stopping: Whether the block has stopped the run; True even if the block catches the exception.
        waiting: The block's pending request; None while it runs or when it has ended.
    """

    __slots__ = (
        "__weakref__",
        "_modes",
        "_name",
        "batch_group",
        "exchange",
        "idx",
        "info",
        "interleaver",
        "intervention",
        "iteration",
        "loops",
        "moved_on",
        "stopping",
        "transform",
        "waiting",
        "worker",
    )

    MissedProviderError = MissedProviderError
    OutOfOrderError = OutOfOrderError
    runs_on: ClassVar[StackKind] = call_stacks

    def __init__(
        self,
        intervention: Callable[[], Any],
        info: Any = None,
        name: str | None = None,
        batch_group: BatchGroup | None = None,
    ) -> None:
        """Prepare a block: its compiled function, and its place in the user's code, if it has one."""
        self.intervention = intervention
        self.info = info
        self._name = name
        self.idx = 0
        self.batch_group = batch_group
        self.iteration: int | None = 0
        self.loops: list[Any] = []
        self.moved_on = False
        self.stopping = False
        self.waiting: Event | None = None
        self.transform: Callable[[], Any] | None = None
        self.exchange: Exchange | None = None
        self.worker: Any = None
        self.interleaver: Interleaver | None = None
        self._modes: Modes

    @property
    def name(self) -> str:
        return self._name if self._name is not None else f"Mediator{id(self)}"

    @property
    def alive(self) -> bool:
        return self.worker is not None

    # Called on the model's side.

    def start(self, interleaver: Interleaver) -> None:
        """Run the block up to its first request, which is answered if it can be at once."""
        self.interleaver = interleaver
        self.worker = self.runs_on.take_stack()
        self._modes = self._new_modes()
        answer = self._run_block(self.runs_on.start, self._run_intervention)
        if answer is not NOTHING:
            self.respond(answer)

    def _new_modes(self) -> Modes:
        return ModeKeeper()

    def respond(self, value: Any = None) -> None:
        """Answer the block's request, and its next ones as long as they can be answered at once."""
        interleaver = self.interleaver
        assert interleaver is not None  # noqa: S101 - only a waiting block is answered
        answer, refused = value, 0
        while answer is not NOTHING:
            interleaver.unqueue(self)
            self.waiting = None
            self._modes.enter()
            answer = self._run_block(self.runs_on.resume, answer)
            refused += 1
            if refused > _MAX_REFUSED and type(answer) is Raise:
                interleaver.failed(answer.error)  # it catches the error and asks again, presumably forever
                return

    def fail(self, error: BaseException) -> None:
        self.respond(Raise(error))

    def cancel(self) -> None:
        """End the block: its requests raise ``Cancelation``, then ``GreenletExit``, so that it can clean up.

        A block that swallows even that is abandoned, because a stack cannot be unwound from outside.
        """
        for num_requests in range(2 * _MAX_CLEANUP_REQUESTS):
            if self.worker is None:
                return
            error = Cancelation if num_requests < _MAX_CLEANUP_REQUESTS else GreenletExit
            self.fail(error("the trace ended while this block waited"))
        self.worker = None

    def _run_block(self, switch: Callable[[Any, Any], Any], payload: Any) -> Any:
        """Run the block, in its own modes, until it hands over; return an immediate answer or ``NOTHING``."""
        interleaver, worker = self.interleaver, self.worker
        assert interleaver is not None  # noqa: S101 - set by start
        assert worker is not None  # noqa: S101 - a block that has ended is never answered
        outer_block, interleaver.current = interleaver.current, self
        listener, interleaver.listener = interleaver.listener, 0
        try:
            event: Event | call_stacks.Done = switch(worker, payload)
        finally:
            self._modes.leave()
            interleaver.current, interleaver.listener = outer_block, listener
        if self.exchange is not None:
            self.exchange.publish()
        if interleaver.batcher.loans is not None:
            interleaver.reclaim_values()
        if self.transform is not None:
            transform, self.transform = self.transform, None
            interleaver.batcher.swap(self.batch_group, transform())
        if type(event) is call_stacks.Done:
            self.worker = None
            self.runs_on.give_back(worker)
            _, error = event.empty()
            if error is None and self.stopping:
                error = EarlyStopException(_STOPPED)
            if error is not None:
                explain(error)
                interleaver.failed(error)
            elif self.exchange is not None:
                self.exchange.close()
            return NOTHING
        if self.stopping:
            interleaver.failed(EarlyStopException(_STOPPED))
        self.waiting = event  # type: ignore[assignment] # type() narrows less than isinstance(), which is slow
        return interleaver.queue(self)

    def _run_intervention(self) -> None:
        """Run the block's code; an end that the trace itself has caused is no error of the block."""
        try:
            self.intervention()
        except (Cancelation, GreenletExit):
            if self.interleaver is None or not self.interleaver.ending:
                raise
        except StepNotReachedError as error:
            if self.interleaver is not None:
                self.interleaver.warn(error)
        except IterationOver as error:
            raise MissedProviderError(
                "A loop over steps was left in the middle, because generation ended, and what stands "
                "after it would not run. Loop over the steps in the block itself: `for step in "
                "tracer.iter[...]:`."
            ) from error

    # Called on the block's side.

    def request(self, requester: str) -> Any:
        """Return a value, narrowed to this block's rows; ``requester`` may end in a call number, ``.i0``."""
        return self.send_event(Events.VALUE, *split(requester))

    def swap(self, requester: str, value: Any) -> None:
        self.send_event(Events.SWAP, *split(requester), value)

    def skip(self, requester: str, value: Any) -> None:
        """Wait for a module's input, and use ``value`` as its output instead of running the module."""
        self.send_event(Events.SKIP, *split(requester), value)

    def stop(self) -> None:
        self.stopping = True
        raise EarlyStopException(_STOPPED)

    def await_step(self, step: int) -> bool:
        """Wait until some module begins its call number ``step``; return False if generation ends before."""
        interleaver = self.interleaver
        assert interleaver is not None  # noqa: S101 - a running block has one
        if step <= interleaver.step:
            return True
        return bool(self.send_event(Events.STEP, "", step))

    def send_event(self, kind: Events, provider: str, iteration: int | None = None, more: Any = None) -> Any:
        """Hand an event over and return the answer.

        Raises:
            OutOfOrderError: The model has passed this call.
            MissedProviderError: The run ended without it.
            ValueError: The calling code is not this block's: another thread, or a backward block.
        """
        worker = self.worker
        if worker is not getcurrent():
            assert self.interleaver is not None  # noqa: S101 - a started block has one
            raise self.interleaver.foreign_request_error(named(provider, iteration))
        assert worker.parent is not None  # noqa: S101 - the stack that resumed it
        answer = worker.parent.switch((kind, provider, iteration, more))
        if type(answer) is Raise:
            raise answer.error
        return answer


def running() -> Mediator | None:
    """Return the mediator of the block that the calling code runs in, found by its frame: only errors ask."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the frame that asks
    code = Mediator._run_intervention.__code__  # noqa: SLF001 - of this module
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    mediator: Mediator | None = frame.f_locals["self"] if frame is not None else None
    return mediator


def warn(error: StepNotReachedError) -> None:
    """Warn at the line of the block that made the request; the rest of the block does not run."""
    user_lines = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith("nnsight_engine.")
    ]
    frame, line = user_lines[-1]
    warnings.warn_explicit(f"{error} The block ends here.", UserWarning, frame.f_code.co_filename, line)


def split(requester: str) -> tuple[str, int | None]:
    """Return provider and call number of a name such as ``model.output.i2``; None if it has no number."""
    provider, _, suffix = requester.rpartition(".i")
    if provider and suffix.isdecimal():
        return provider, int(suffix)
    return requester, None


def named(provider: str, iteration: int | None) -> str:
    return provider if iteration is None else f"{provider}.i{iteration}"
