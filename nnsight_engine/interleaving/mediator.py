"""One block beside the model's run: it asks for values, waits, and goes on where it waited.

A mediator's block runs on a stack of its own. Whatever it wants from the model's side is an *event* that it
hands over, and then it stands still until the interleaver answers. One side runs at a time.

**What waits for ever, and what happens then.** A block waits for a value by its name and call number,
``model.layers.3.output.i0``. It would wait in vain if the model has passed that call already: known at once,
since calls are counted, and an ``OutOfOrderError``. It would also wait in vain if the call never comes, or
if it stands at a barrier that others never reach: known when the model's run ends, and a
``MissedProviderError``. Both are raised in the block, at the line that asks.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from greenlet import GreenletExit, getcurrent

from nnsight_engine.core.gradients import explain
from nnsight_engine.core.stepping import IterationOver
from nnsight_engine.interleaving import stacks
from nnsight_engine.interleaving.batching import BatchGroup
from nnsight_engine.interleaving.events import (
    Cancelation,
    EarlyStopException,
    Events,
    MissedProviderError,
    OutOfOrderError,
    StepNotReachedError,
)
from nnsight_engine.interleaving.modes import Keeper

if TYPE_CHECKING:
    from nnsight_engine.interleaving.interleaver import Interleaver
    from nnsight_engine.interleaving.sharing import Exchange

Event = tuple[Events, str, int | None, Any]
"""What is asked for: kind, provider without its call number, call number, anything more."""

NOTHING = object()
"""No answer yet."""

_STOPPED = "the trace was stopped by its block"

_MAX_REFUSED = 500
"""Requests in a row for what cannot come, after which a block has failed whatever it does with the errors."""

_PATIENCE = 16
"""Requests that a cancelled block may still make while it cleans up, before it is ended without mercy."""


class StackKind(Protocol):
    """What blocks run on, see ``stacks``: something that takes turns with the model."""

    def take(self) -> Any:
        """Return one without a job."""

    def start(self, stack: Any, job: Callable[[], Any]) -> Any:
        """Give it a job; returns what it first hands over."""

    def resume(self, stack: Any, payload: Any) -> Any:
        """Hand it what it waits for; returns what it hands over next."""

    def give_back(self, stack: Any) -> None:
        """Take it back when its job is done."""


class Modes(Protocol):
    """Keeps a block's modes of torch apart from the model's, see ``modes``."""

    def enter(self) -> None:
        """Change to the block's."""

    def leave(self) -> None:
        """Change back to the model's."""


class Raise:
    """An answer that raises in the block, at the line that waits."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        """Keep the error."""
        self.error = error


class Mediator:
    """Runs one block and answers what it asks for.

    Attributes:
        intervention: The compiled block.
        info: Where the block comes from, for messages; may be None.
        batch_group: First row and number of rows of the batch that this block owns; None sees all rows.
        iteration: The call number that requests are for; None means the next one to come.
        loops: The loops over steps that the block is in, innermost last.
        moved_on: Whether the block chose the call number itself, with ``next()``.
        stopping: Whether the block has stopped the run. It stays so, should it catch what tells it.
        exchange: Passes on what the block has assigned, each time it hands over.
        waiting: What the block asked for and has not got; None while it runs or when it has ended.
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
    runs_on: ClassVar[StackKind] = stacks

    def __init__(
        self,
        intervention: Callable[[], Any],
        info: Any = None,
        name: str | None = None,
        batch_group: BatchGroup | None = None,
    ) -> None:
        """Prepare a block; nothing runs before ``start``."""
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
        """What the block is called in messages."""
        return self._name if self._name is not None else f"Mediator{id(self)}"

    @property
    def alive(self) -> bool:
        """Whether the block has started and not ended."""
        return self.worker is not None

    # On the model's side.

    def start(self, interleaver: Interleaver) -> None:
        """Run the block until it first waits."""
        self.interleaver = interleaver
        self.worker = self.runs_on.take()
        self._modes = self._new_modes()
        answer = self._go_on(self.runs_on.start, self._work)
        if answer is not NOTHING:
            self.respond(answer)

    def _new_modes(self) -> Modes:
        """Return what keeps the modes apart; it begins with the block's, the same as the model's."""
        return Keeper()

    def respond(self, value: Any = None) -> None:
        """Answer what the block waits for, and run it until it waits again."""
        interleaver = self.interleaver
        assert interleaver is not None  # noqa: S101 - only who waits is answered
        answer, refused = value, 0
        while answer is not NOTHING:
            interleaver.unqueue(self)
            self.waiting = None
            self._modes.enter()
            answer = self._go_on(self.runs_on.resume, answer)
            refused += 1
            if refused > _MAX_REFUSED and type(answer) is Raise:
                interleaver.failed(answer.error)  # it catches the error and asks again, for ever it seems
                return

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in the block, where it waits."""
        self.respond(Raise(error))

    def cancel(self) -> None:
        """End the block: whatever it waits for raises, so that it can clean up.

        First ``Cancelation``, then ``GreenletExit``, which ``except Exception`` lets through. A block that
        swallows even that for ever is left where it is, because nothing can unwind a stack from outside.
        """
        for patience in range(2 * _PATIENCE):
            if self.worker is None:
                return
            error = Cancelation if patience < _PATIENCE else GreenletExit
            self.fail(error("the trace ended while this block waited"))
        self.worker = None

    def _go_on(self, how: Callable[[Any, Any], Any], payload: Any) -> Any:
        """Let the block run, whose modes have been entered: the model may be in ``no_grad``, or the block.

        Notes what it asks for next, and returns an answer that can be given at once, or ``NOTHING``.
        """
        interleaver, worker = self.interleaver, self.worker
        assert interleaver is not None  # noqa: S101 - set by start
        assert worker is not None  # noqa: S101 - a block that has ended is never answered
        before, interleaver.current = interleaver.current, self
        listener, interleaver.listener = interleaver.listener, 0
        try:
            event: Event | stacks.Done = how(worker, payload)
        finally:
            self._modes.leave()
            interleaver.current, interleaver.listener = before, listener
        if self.exchange is not None:
            self.exchange.publish()
        if interleaver.batcher.loans is not None:
            interleaver.take_back()
        if self.transform is not None:
            transform, self.transform = self.transform, None
            interleaver.batcher.swap(self.batch_group, transform())
        if type(event) is stacks.Done:
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

    def _work(self) -> None:
        """The block's job on its stack."""
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

    # On the block's side.

    def request(self, requester: str) -> Any:
        """Wait for a value and return it, narrowed to this block's rows.

        Args:
            requester: Provider with its call number, ``model.layers.3.output.i0``, or without one.
        """
        return self.ask(Events.VALUE, *split(requester))

    def swap(self, requester: str, value: Any) -> None:
        """Wait for a value to come by, and replace it."""
        self.ask(Events.SWAP, *split(requester), value)

    def skip(self, requester: str, value: Any) -> None:
        """Wait for a module's input, and have ``value`` as its output instead of running it."""
        self.ask(Events.SKIP, *split(requester), value)

    def stop(self) -> None:
        """End this block and the model's run."""
        self.stopping = True
        raise EarlyStopException(_STOPPED)

    def await_step(self, step: int) -> bool:
        """Wait until some module makes its call number ``step``; False if generation is over before."""
        interleaver = self.interleaver
        assert interleaver is not None  # noqa: S101 - a running block has one
        if step <= interleaver.step:
            return True
        return bool(self.ask(Events.STEP, "", step))

    def ask(self, kind: Events, provider: str, iteration: int | None = None, more: Any = None) -> Any:
        """Hand an event over and return the answer.

        Raises:
            OutOfOrderError: The model has passed this call.
            MissedProviderError: The run ended without it.
            ValueError: The code that asks is not this block's: a thread of its own, or a backward block.
        """
        worker = self.worker
        if worker is not getcurrent():
            assert self.interleaver is not None  # noqa: S101 - a started block has one
            raise self.interleaver.foreign(named(provider, iteration))
        assert worker.parent is not None  # noqa: S101 - whoever resumed it
        answer = worker.parent.switch((kind, provider, iteration, more))
        if type(answer) is Raise:
            raise answer.error
        return answer


def warn(error: StepNotReachedError) -> None:
    """Warn at the line of the block that asked; what follows it does not run."""
    places = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith("nnsight_engine.")
    ]
    frame, line = places[-1]
    warnings.warn_explicit(f"{error} The block ends here.", UserWarning, frame.f_code.co_filename, line)


def split(requester: str) -> tuple[str, int | None]:
    """Take ``model.output.i2`` apart into its provider and call number."""
    provider, _, suffix = requester.rpartition(".i")
    if provider and suffix.isdecimal():
        return provider, int(suffix)
    return requester, None


def named(provider: str, iteration: int | None) -> str:
    """Put a provider and a call number together, as messages show them."""
    return provider if iteration is None else f"{provider}.i{iteration}"
