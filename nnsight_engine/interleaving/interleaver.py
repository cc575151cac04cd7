"""The model's side of a trace: it receives every value that the model provides, and serves waiting blocks.

Providers are points of the model, such as ``model.layers.3.output``; each time one is reached is a call with
a number. ``wanted``, the blocks by the provider that they wait for, is checked first: a point that no block
asked for costs one dict look-up. Blocks are answered in order of definition, until none waits for the current
value.

Backends that distribute the model have hooks on a block's direct use of modules, beside the model's run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from nnsight_engine.core.errors import IterationOver
from nnsight_engine.interleaving import call_stacks
from nnsight_engine.interleaving.batching import Batcher, difference, refuse_unpacked
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

if TYPE_CHECKING:
    import torch


class ModuleUse:
    """The hooks that envoys call; this class is for a model in one process."""

    def applied(
        self,
        path: str,  # noqa: ARG002 - a hook
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "",  # noqa: ARG002 - a hook
    ) -> Any:
        """Apply the module at ``path``, or a method of it, to values of a block, beside the model's run."""
        return apply(*args, **kwargs)

    def called_directly(self, path: str) -> None:
        """Record a direct call of the module at ``path``, beside ``applied``; a subclass may reject it."""

    def whole_tensor(self, path: str, name: str, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - a hook
        """Return a tensor of the module at ``path``, whole; a subclass may gather its parts."""
        return value


class Watcher(Protocol):
    """A reader of some providers' values, called after all blocks were served; a cache, for example."""

    def add(self, provider: str, iteration: int | None, value: Any) -> None: ...


class Interleaver(ModuleUse):
    """Interleaves the run of a function with the blocks of one trace.

    Attributes:
        current: The block that is running; None while the model runs.
        step: The highest call number that any module has begun.
        listener: The id of the thread whose module calls belong to the traced run; other threads may call
            modules untraced. 0 without a run, and while a block runs, because it may call modules itself.
        clock: The provider whose calls are the run's steps; None if any module's calls are.
        ending: Whether the run has ended, so that blocks are cancelled.
        loops_over: Whether no further step begins; ``over``: nor any further call of a module.
        closed: Whether nothing is provided any more, not even the result.
        released: Blocks that met at a barrier and are to be resumed.
        providing: The provider and call number of the value that is served now.
        skipped: The blocks that skip the current module, with the outputs that they give.
    """

    def __init__(
        self, mediators: Iterable[Mediator] = (), tracer: Any = None, batcher: Batcher | None = None
    ) -> None:
        """Create an interleaver; that of a model gets the blocks of each run by ``initialize``."""
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
        """Prepare for a run with these blocks, and drop what an earlier run has left."""
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
        self.suspects: list[str] = []
        for index, mediator in enumerate(mediators):
            mediator.idx = index

    def __deepcopy__(self, memo: dict[int, Any]) -> Interleaver:
        copied = memo[id(self)] = type(self)()
        return copied

    def forget(self) -> None:
        """Drop the blocks and values of a run: the model keeps its interleaver."""
        self.mediators = []
        self.tracer = None
        self.batcher = _NO_BATCH
        self.wanted.clear()
        self.watchers.clear()
        self.error = None
        self.released.clear()
        self.skipped.clear()
        self.suspects.clear()

    # The run.

    def run(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` with the blocks; return None if a block stopped it. Errors of both are raised."""
        return call_stacks.run(lambda: self._run(function))

    def _run(self, function: Callable[[], Any]) -> Any:
        """Run the model and its last hand-overs; raise the error of a block, if there is one."""
        try:
            with self:
                result = self._call_model(function)
                self.end_steps()
                result = self.handle("result", result)
                self.check_dangling_mediators()
                return result
        except ModelAborted:
            pass  # handled before the raise below, so that it does not become that error's context
        if self.error is not None:
            raise self.error
        return None

    def _call_model(self, function: Callable[[], Any]) -> Any:
        """Call the traced function; an error of it names the last assignments of blocks."""
        try:
            return function()
        except Exception as error:
            for suspect in self.suspects:
                error.add_note(suspect)
            raise

    def suspect(self, note: str) -> None:
        """Record an assignment that the model may fail of, to be named if it does."""
        self.suspects.append(note)
        del self.suspects[:-_MAX_SUSPECTS]

    def __enter__(self) -> Interleaver:
        """Start all blocks, each up to its first request."""
        self.interleaving = True
        self.listener = threading.get_ident()
        try:
            for mediator in self.mediators:
                mediator.start(self)
                if self.released or self.stopped or self.error is not None:
                    self._settle()
        except BaseException:
            self._end_run()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_run()

    def _end_run(self) -> None:
        """Cancel the blocks that still wait, and drop the run's state."""
        self.ending = True
        self.cancel()
        self.interleaving = False
        self.current = None
        self.listener = 0
        self.providing = None
        self.batcher.current_value = None

    def cancel(self) -> None:
        for mediator in self.mediators:
            mediator.cancel()

    def failed(self, error: BaseException) -> None:
        """Record the error of a block; the model is unwound as soon as it has control."""
        if isinstance(error, EarlyStopException):
            self.stopped = True
        elif self.error is None and not self.ending:
            self.error = error

    def warn(self, error: StepNotReachedError) -> None:
        warn(error)

    def _settle(self) -> None:
        """Resume blocks that a barrier released; unwind the model if a block has failed or stopped it."""
        while self.released and self.error is None:
            self.released.pop(0).respond()
        if (self.error is not None or self.stopped) and not self.ending:
            self.wanted.clear()
            raise ModelAborted

    # Requests of blocks.

    def queue(self, mediator: Mediator) -> Any:
        """Queue a block for its request; return an answer if there is one at once, otherwise ``NOTHING``."""
        event = mediator.waiting
        assert event is not None  # noqa: S101 - it has just asked
        kind, provider, iteration, more = event
        if self.ending:
            return NOTHING  # `Mediator.cancel` answers, and limits the number of requests
        if self.closed:
            return Raise(self._missed(mediator, event))
        if kind is _BARRIER:
            more.arrive(mediator)
        elif kind is _STEP:
            return False if self.loops_over else NOTHING
        elif iteration is not None and (self.over or iteration < self.num_calls(provider)):
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
        """Return the answer to a request for a call that is past, or will not come: always an error."""
        if self._ends_loop(mediator, event):
            return Raise(IterationOver(mediator.loops[-1]))
        return Raise(self._missed(mediator, event))

    def _ends_loop(self, mediator: Mediator, event: Event) -> bool:
        """Return whether a request is for the step after the last, not for a point that was not reached.

        Without a clock, a module that is called twice in one step makes a loop begin one step too many.
        """
        if not self.over or self.clock is not None or not mediator.loops or not mediator.loops[-1].open_ended:
            return False
        number = event[2] or 0
        return bool(number) and number == self.num_calls(event[1]) and number >= self.step

    def watch(self, watcher: Watcher, providers: Iterable[str]) -> None:
        """Call ``watcher`` with the values of these providers from now on, after the blocks were served."""
        for provider in providers:
            self.watchers.setdefault(provider, []).append(watcher)
            self.wanted.setdefault(provider, [])

    def unqueue(self, mediator: Mediator) -> None:
        """Remove a block from those that wait for its provider."""
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
        """Append the call number that applies to requests of the running block: ``model.output.i2``."""
        return named(requester, self.call_number(requester))

    def call_number(self, provider: str) -> int:
        """Return which call a request of the running block is for: of its step, the current, or the next."""
        mediator = self.current
        if mediator is not None and mediator.iteration is not None:
            return mediator.iteration
        providing = self.providing
        if providing is not None and providing[0] == provider and providing[1] is not None:
            return providing[1]
        return self.num_calls(provider)

    def num_calls(self, provider: str) -> int:
        return self.calls.get(provider, 0)

    def foreign_request_error(self, requester: str) -> ValueError:
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

    # Values from the model.

    def handle(self, provider: str | None = None, value: Any = None, iterate: bool = False) -> Any:  # noqa: FBT001, FBT002 - the documented signature
        """Provide a value that is no module's input or output, such as a token; return it as blocks left it.

        Without a ``provider`` it is returned unchanged; ``iterate`` gives each value the next call number.
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
        """Serve the value to every block that waits for this call; return the value after their changes."""
        batcher, outer_providing = self.batcher, self.providing
        outer_value, outer_loans = batcher.current_value, batcher.loans
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
            self.providing = outer_providing
            batcher.current_value, batcher.loans = outer_value, outer_loans

    def _serve_all(self, provider: str, number: int | None) -> None:
        """Answer one block after the other until none waits for this call, as one may ask again."""
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
        """Answer one block: give it the value, note that it skips the module, or take its replacement."""
        kind, _, _, more = event
        if kind is _VALUE:
            batcher, group = self.batcher, mediator.batch_group
            gets_all = group is None and batcher.loans is None
            mediator.respond(batcher.current_value if gets_all else batcher.narrow(group))
            return
        if kind is _SKIP:
            self.skipped.append((mediator, more))
            mediator.respond()
            return
        previous_value = self.batcher.current_value
        try:
            if self.batcher.covers_batch(mediator.batch_group):
                refuse_unpacked(previous_value, more)
            self.batcher.swap(mediator.batch_group, more)
        except ValueError as error:
            mediator.fail(error)
        else:
            mediator.respond(difference(previous_value, self.batcher.current_value))

    def skip_value(self, path: str) -> Any:
        """Return the output that blocks gave for a skipped module; ValueError if not all skipped it."""
        skipped, self.skipped = self.skipped, []
        outputs_for_all = [
            value for mediator, value in skipped if self.batcher.covers_batch(mediator.batch_group)
        ]
        if outputs_for_all:
            return outputs_for_all[-1]
        rows = {mediator.batch_group: value for mediator, value in skipped}
        missing = [group for group in self.batcher.groups if group not in rows]
        if missing:
            raise ValueError(
                f"{path} is skipped in {len(rows)} of {len(self.batcher.groups)} invokes; a module runs "
                "for all of them or for none, so skip it in every one"
            )
        return self.batcher.join([rows[group] for group in self.batcher.groups])

    def reclaim_values(self) -> None:
        """Check what the block did with its values; record an error of the block if it was not allowed."""
        try:
            self.batcher.reclaim()
        except ValueError as error:
            self.failed(error)

    def advance(self, provider: str, number: int) -> None:
        """Record that a module begins its call ``number``, and resume the loops that wait for this step."""
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

    # The end of the run.

    def end_loops(self) -> None:
        """End the loops over steps; the traced function may still provide values after the last step."""
        self.loops_over = True
        for mediator in self._waiting():
            event = mediator.waiting
            if event is not None and event[0] is _STEP:
                mediator.respond(value=False)
            self._settle()
        self._settle()  # the model may have caught the exception that unwinds it

    def end_steps(self) -> None:
        """End the loops over steps: there are no more steps. The blocks' code after the loops runs now."""
        self.end_loops()
        self.over = True
        for mediator in self._waiting():
            event = mediator.waiting
            if event is not None and self._ends_loop(mediator, event):
                mediator.respond(self._too_late(mediator, event))
            self._settle()

    def check_dangling_mediators(self) -> None:
        """Raise an error in each block that still waits when the run has ended."""
        self.closed = True
        for mediator in self._waiting():
            if mediator.waiting is not None:
                mediator.fail(self._missed(mediator, mediator.waiting))
                self._settle()

    def _missed(self, mediator: Mediator, event: Event) -> MissedProviderError:
        """Return the error for a request that can no longer be answered, with the reason."""
        kind, provider, iteration, more = event
        if kind is Events.BARRIER:
            return MissedProviderError(more.unmet())
        requester = named(provider, iteration)
        calls = self.num_calls(provider)
        if iteration is not None and iteration < calls:
            return OutOfOrderError(
                f"Value was missed for {requester}. Did you call an Envoy out of order? The model has "
                "passed this point: request values in the order in which the model computes them, or in "
                "separate invokes."
            )
        if provider.endswith(".grad"):
            return MissedProviderError(
                f"Execution complete but `{requester}` was not provided. Did you call an Envoy out of "
                "order? Gradients are computed in the reverse order of the forward pass, and only for "
                "tensors that the loss was computed from. A part of a value, such as `output[0]`, is a "
                "tensor that the model does not use: take the part of the gradient, `output.grad[0]`. Blocks "
                "return one tensor, so `output` is what `output[0]` was in older scripts."
            )
        if iteration is not None and calls:
            error_type = StepNotReachedError if mediator.moved_on else MissedProviderError
            return error_type(_ended(requester, calls))
        missed = MissedProviderError(
            f"Execution complete but `{requester}` was not provided. Did you call an Envoy out of order? "
            "Investigate why this module was not called."
        )
        missed.provider = provider
        return missed


def _ended(requester: str, calls: int) -> str:
    """Return the message for a request for a step that never came, after ``calls`` calls."""
    times = "once" if calls == 1 else f"{calls} times"
    return (
        f"Execution complete but `{requester}` was not provided. It was reached {times}, and the run, or its "
        "generation, has ended: there are no further steps. Read a step's values inside the loop (`if step "
        f"== {calls - 1}:`), or in an invoke of their own (`with tracer.invoke():`), and the result of the "
        "whole run with `tracer.result`."
    )


_MAX_SUSPECTS = 4
"""Number of assignments that an error of the model names, the last ones."""

_NO_BATCH = Batcher()
"""The batcher between runs."""

_VALUE, _SKIP, _STEP, _BARRIER = Events.VALUE, Events.SKIP, Events.STEP, Events.BARRIER
"""Aliases, because the look-up of an enum member is slow."""


def _order(mediator: Mediator) -> int:
    return mediator.idx
