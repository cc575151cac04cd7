"""The model's side of a trace: it hears every value that the model makes, and lets blocks have theirs.

Providers are places in the model, ``model.layers.3.output``, and each time one is reached is a call with a
number. ``wanted`` holds the providers that some block waits for; whoever provides looks there first, so a
place nobody asked for costs a look-up. Blocks are answered in the order they were defined, and again until
none of them wants more of the value at hand; only then does the model go on with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol

from nnsight_engine.core.stepping import IterationOver
from nnsight_engine.interleaving import stacks
from nnsight_engine.interleaving.batching import Batcher
from nnsight_engine.interleaving.events import (
    EarlyStopException,
    Events,
    MissedProviderError,
    ModelAborted,
    OutOfOrderError,
    StepNotReachedError,
)
from nnsight_engine.interleaving.gradients import in_backward
from nnsight_engine.interleaving.mediator import NOTHING, Event, Mediator, Raise, named, warn
from nnsight_engine.interleaving.module_use import ModuleUse


class Watcher(Protocol):
    """Sees the values of some providers after every block has; a cache, for one."""

    def add(self, provider: str, iteration: int | None, value: Any) -> None:
        """Take note of a value."""


class Interleaver(ModuleUse):
    """Lets a function's run and the blocks of one trace take turns.

    Attributes:
        mediators: The blocks, in the order in which they are answered.
        batcher: Whose rows are whose, and the value at hand.
        current: The block that is running; None while the model is.
        wanted: For each provider that is waited for, the blocks that wait, in the order they are answered.
        calls: How often each provider was reached.
        step: The highest call number that any module has begun.
        listener: The thread whose calls of modules are the model's own, which may run in others at the same
            time, untraced; 0 while a block runs, which may call modules for itself, and without a run.
        clock: The provider whose calls are the run's steps; None if any module's are.
        ending: Whether the run is over and blocks are being cleaned up.
    """

    def __init__(
        self, mediators: Iterable[Mediator] = (), tracer: Any = None, batcher: Batcher | None = None
    ) -> None:
        """Start without a run."""
        self.current: Mediator | None = None
        self.interleaving = False
        self.listener = 0
        self.wanted: dict[str, list[Mediator]] = {}
        self.calls: dict[str, int] = {}
        self.watchers: dict[str, list[Watcher]] = {}
        self.exclusive = threading.RLock()
        self.initialize(list(mediators), tracer, batcher)

    def initialize(
        self, mediators: list[Mediator], tracer: Any = None, batcher: Batcher | None = None
    ) -> None:
        """Make ready for a run with these blocks."""
        self.mediators = mediators
        self.tracer = tracer
        self.batcher = batcher if batcher is not None else Batcher()
        self.wanted.clear()
        self.calls.clear()
        self.watchers.clear()
        self.step = 0
        self.clock: str | None = None
        self.ending = False
        self.loops_over = False
        self.over = False
        self.error: BaseException | None = None
        self.stopped = False
        self.closed = False
        self.released: list[Mediator] = []
        self.providing: tuple[str, int | None] | None = None
        self.skipped: list[tuple[Mediator, Any]] = []
        for index, mediator in enumerate(mediators):
            mediator.idx = index

    def forget(self) -> None:
        """Drop what the last run held: nothing of it is to live on but what was saved."""
        self.mediators = []
        self.tracer = None
        self.batcher = _NO_BATCH
        self.wanted.clear()
        self.watchers.clear()
        self.error = None
        self.released.clear()
        self.skipped.clear()

    # A run.

    def run(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` with the blocks beside it; returns its result, None if a block stopped it.

        Raises:
            BaseException: What a block raised, or ``function`` did.
        """
        return stacks.run(lambda: self._run(function))

    def _run(self, function: Callable[[], Any]) -> Any:
        try:
            with self:
                result = function()
                self.end_steps()
                result = self.handle("result", result)
                self.check_dangling_mediators()
                return result
        except ModelAborted:
            pass  # left before raising, so that it does not become the error's context
        if self.error is not None:
            raise self.error
        return None

    def __enter__(self) -> Interleaver:
        """Start every block: each runs until it first waits."""
        self.interleaving = True
        self.listener = threading.get_ident()
        try:
            for mediator in self.mediators:
                mediator.start(self)
                if self.released or self.stopped or self.error is not None:
                    self._settle()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what still waits."""
        self._end()

    def _end(self) -> None:
        self.ending = True
        self.cancel()
        self.interleaving = False
        self.current = None
        self.listener = 0
        self.providing = None
        self.batcher.current_value = None

    def cancel(self) -> None:
        """End every block that has not ended."""
        for mediator in self.mediators:
            mediator.cancel()

    def failed(self, error: BaseException) -> None:
        """Take note that a block raised; the model is unwound once it has control."""
        if isinstance(error, EarlyStopException):
            self.stopped = True
        elif self.error is None and not self.ending:
            self.error = error

    def warn(self, error: StepNotReachedError) -> None:
        """Warn of a block that ended because it asked for a step that did not come."""
        warn(error)

    def _settle(self) -> None:
        """Run blocks that a barrier has released; unwind the model if a block failed or stopped it."""
        while self.released and self.error is None:
            self.released.pop(0).respond()
        if (self.error is not None or self.stopped) and not self.ending:
            self.wanted.clear()
            raise ModelAborted

    # What blocks wait for.

    def queue(self, mediator: Mediator) -> Any:
        """Let a block wait for what it asked for; returns an answer if one can be given at once."""
        event = mediator.waiting
        assert event is not None  # noqa: S101 - it has just asked
        kind, provider, iteration, more = event
        if self.ending:
            return NOTHING  # whoever cancels it answers, and counts how often
        if self.closed:
            return Raise(self._missed(mediator, event))
        if kind is _BARRIER:
            more.arrive(mediator)
        elif kind is _STEP:
            return False if self.loops_over else NOTHING
        elif iteration is not None and (self.over or iteration < self.calls.get(provider, 0)):
            return self._too_late(mediator, event)
        else:
            waiting = self.wanted.get(provider)
            if waiting is None:
                self.wanted[provider] = [mediator]
                return NOTHING
            waiting.append(mediator)
            if len(waiting) > 1 and waiting[-2].idx > mediator.idx:
                waiting.sort(key=_order)
        return NOTHING

    def _too_late(self, mediator: Mediator, event: Event) -> Raise:
        if self._ends_loop(mediator, event):
            return Raise(IterationOver(mediator.loops[-1]))
        return Raise(self._missed(mediator, event))

    def _ends_loop(self, mediator: Mediator, event: Event) -> bool:
        """Tell whether a request is for the step after the last one, rather than for a place not reached.

        Where nothing tells steps apart, a module called twice in one step lets a loop begin once too often.
        """
        if not self.over or self.clock is not None or not mediator.loops or not mediator.loops[-1].open_ended:
            return False
        number = event[2] or 0
        return bool(number) and number == self.calls.get(event[1], 0) and number >= self.step

    def watch(self, watcher: Watcher, providers: Iterable[str]) -> None:
        """Let ``watcher`` see the values of these providers from now on, after the blocks have."""
        for provider in providers:
            self.watchers.setdefault(provider, []).append(watcher)
            self.wanted.setdefault(provider, [])

    def unqueue(self, mediator: Mediator) -> None:
        """Forget that a block waits."""
        event = mediator.waiting
        if event is None:
            return
        provider = event[1]
        waiting = self.wanted.get(provider)
        if waiting is not None and mediator in waiting:
            if len(waiting) > 1 or provider in self.watchers:
                waiting.remove(mediator)
            else:
                del self.wanted[provider]

    def iterate_requester(self, requester: str) -> str:
        """Add the call number that the running block's requests are for: ``model.output.i2``."""
        return named(requester, self.call_number(requester))

    def call_number(self, provider: str) -> int:
        """Return the number of the call that a request of the running block means."""
        mediator = self.current
        if mediator is not None and mediator.iteration is not None:
            return mediator.iteration
        providing = self.providing
        if providing is not None and providing[0] == provider and providing[1] is not None:
            return providing[1]
        return self.calls.get(provider, 0)

    def foreign(self, requester: str) -> ValueError:
        """Return the error for a request by code that is not the running block's own."""
        if in_backward():
            return ValueError(
                f"Cannot request `{requester}` in a backwards tracer. You can only request `.grad`. Please "
                "define your Tensors before the Backwards Tracer and interact with their gradients within "
                "the Backwards Tracer."
            )
        return ValueError(
            f"Cannot request `{requester}` here: this code runs in another thread, or in the block of "
            "another trace inside this one. Take the value in the block that waits for it, and use it "
            "here."
        )

    # What the model provides.

    def handle(self, provider: str | None = None, value: Any = None, iterate: bool = False) -> Any:  # noqa: FBT001, FBT002 - the documented signature
        """Provide a value that no module call makes: a result, a token, logits.

        Args:
            provider: Its name.
            value: What blocks may read and replace.
            iterate: Whether it comes again and again, each time with the next call number.

        Returns:
            The value as the blocks left it.
        """
        if provider is None:
            return value
        number = self.calls.get(provider, 0) if iterate else None
        if provider in self.wanted:
            value = self.offer(provider, number, value)
        if iterate:
            self.calls[provider] = self.calls.get(provider, 0) + 1
        return value

    def offer(self, provider: str, number: int | None, value: Any) -> Any:
        """Let every block that waits for this call have the value; returns it as they left it."""
        batcher, outer = self.batcher, self.providing
        handled, loans = batcher.current_value, batcher.loans
        batcher.current_value, batcher.loans = value, None
        self.providing = (provider, number)
        try:
            self._serve_all(provider, number)
            if batcher.loans is not None:
                batcher.settle()  # type: ignore[unreachable] # serving may have set it
            if self.watchers:
                for watcher in self.watchers.get(provider, ()):
                    watcher.add(provider, number, batcher.current_value)
            return batcher.current_value
        finally:
            self.providing = outer
            batcher.current_value, batcher.loans = handled, loans

    def _serve_all(self, provider: str, number: int | None) -> None:
        """Answer the blocks that wait for this call, whose value is at hand, until none of them does."""
        wanted = self.wanted
        while provider in wanted:
            for mediator in wanted[provider]:
                event = mediator.waiting
                if event is not None and event[2] == number:
                    break
            else:
                return  # they wait for other calls
            self._serve(mediator, event)
            if self.released or self.stopped or self.error is not None:
                self._settle()

    def _serve(self, mediator: Mediator, event: Event) -> None:
        """Answer a block whose value is at hand."""
        kind, _, _, more = event
        if kind is _VALUE:
            batcher, group = self.batcher, mediator.batch_group
            whole = group is None and batcher.loans is None
            mediator.respond(batcher.current_value if whole else batcher.narrow(group))
            return
        if kind is _SKIP:
            self.skipped.append((mediator, more))
            mediator.respond()
            return
        try:
            self.batcher.swap(mediator.batch_group, more)
        except ValueError as error:
            mediator.fail(error)
        else:
            mediator.respond()

    def skip_value(self, path: str) -> Any:
        """Return the output that blocks gave for the module at ``path``, whose run they skip.

        Raises:
            ValueError: Some invoke did not skip it, or the values cannot be put together.
        """
        skipped, self.skipped = self.skipped, []
        whole = [value for mediator, value in skipped if self.batcher.sees_all(mediator.batch_group)]
        if whole:
            return whole[-1]
        rows = {mediator.batch_group: value for mediator, value in skipped}
        missing = [group for group in self.batcher.groups if group not in rows]
        if missing:
            raise ValueError(
                f"{path} is skipped in {len(rows)} of {len(self.batcher.groups)} invokes; a module runs "
                "for all of them or for none, so skip it in every one"
            )
        return self.batcher.join([rows[group] for group in self.batcher.groups])

    def take_back(self) -> None:
        """See what a block has done with what it was given, once it has handed over."""
        try:
            self.batcher.took_back()
        except ValueError as error:
            self.failed(error)

    def advance(self, provider: str, number: int) -> None:
        """Take note that a module begins its call ``number``: loops over steps may go on."""
        if self.clock is not None and provider != self.clock:
            return
        self.step = number
        for mediator in self._waiting():
            event = mediator.waiting
            if event is not None and event[0] is _STEP and event[2] is not None and event[2] <= number:
                mediator.respond(value=True)
                self._settle()

    def _waiting(self) -> list[Mediator]:
        return [mediator for mediator in self.mediators if mediator.waiting is not None]

    # When the run is over.

    def end_loops(self) -> None:
        """End the loops over steps; the traced function still has something to provide after the last."""
        self.loops_over = True
        for mediator in self._waiting():
            event = mediator.waiting
            if event is not None and event[0] is _STEP:
                mediator.respond(value=False)
            self._settle()
        self._settle()  # the model may have swallowed what unwound it

    def end_steps(self) -> None:
        """End the loops over steps: no further one comes. What stands after them runs now."""
        self.end_loops()
        self.over = True
        for mediator in self._waiting():
            event = mediator.waiting
            if event is not None and self._ends_loop(mediator, event):
                mediator.respond(self._too_late(mediator, event))
            self._settle()

    def check_dangling_mediators(self) -> None:
        """Fail every block that still waits: what it waits for cannot come any more."""
        self.closed = True
        for mediator in self._waiting():
            if mediator.waiting is not None:
                mediator.fail(self._missed(mediator, mediator.waiting))
                self._settle()

    def _missed(self, mediator: Mediator, event: Event) -> MissedProviderError:
        kind, provider, iteration, more = event
        if kind is Events.BARRIER:
            return MissedProviderError(more.unmet())
        requester = named(provider, iteration)
        calls = self.calls.get(provider, 0)
        if iteration is not None and iteration < calls:
            return OutOfOrderError(
                f"Value was missed for {requester}. Did you call an Envoy out of order? The model has "
                "passed this place: ask for values in the order in which it reaches them, or in separate "
                "invokes."
            )
        if provider.endswith(".grad"):
            return MissedProviderError(
                f"Execution complete but `{requester}` was not provided. Did you call an Envoy out of "
                "order? Gradients come in the reverse order of the forward pass, and only to tensors that "
                "the loss was computed from."
            )
        if iteration is not None and calls:
            error_type = StepNotReachedError if mediator.moved_on else MissedProviderError
            return error_type(_ended(requester, calls))
        never = MissedProviderError(
            f"Execution complete but `{requester}` was not provided. Did you call an Envoy out of order? "
            "Investigate why this module was not called."
        )
        never.provider = provider
        return never


def _ended(requester: str, calls: int) -> str:
    times = "once" if calls == 1 else f"{calls} times"
    return (
        f"Execution complete but `{requester}` was not provided. It was reached {times}, and the run, or its "
        "generation, has ended: no further step comes. Read a step's values inside the loop (`if step == "
        f"{calls - 1}:`), or in an invoke of their own (`with tracer.invoke():`), and what the whole run "
        "returns with `tracer.result`."
    )


_NO_BATCH = Batcher()
"""What stands for a batch between runs."""

_VALUE, _SKIP, _STEP, _BARRIER = Events.VALUE, Events.SKIP, Events.STEP, Events.BARRIER
"""An enumeration's members are slow to look up."""


def _order(mediator: Mediator) -> int:
    return mediator.idx
