"""One traced request, over all the steps of the engine that it lives through.

The block's requests are for generation steps: ``.i0`` is the whole prompt, ``.i1`` the forward pass of the
first generated token, and so on. What the engine runs are *spans* of positions, and the two differ: a prompt
may come in chunks, and after a preemption everything so far is computed again in one go. So a value is
addressed by absolute positions. Positions that the block has seen are never shown to it again; what it wrote
there is written again, or the rebuilt keys and values would lack it.

Nothing a block does raises into the model: the request notes its failure and is ended after the step.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.interleaving.events import Events, StepNotReachedError
from nnsight_engine.interleaving.interleaver import Interleaver, Watcher
from nnsight_engine.interleaving.mediator import Mediator, Raise
from nnsight_engine.interleaving.threads import TimeBudgetError
from nnsight_engine.vllm_backend.traces.caches import RequestCaches
from nnsight_engine.vllm_backend.traces.chunks import PromptChunks
from nnsight_engine.vllm_backend.traces.holdings import Holdings
from nnsight_engine.vllm_backend.traces.rows import FlatBatcher
from nnsight_engine.vllm_backend.traces.writes import PastWrites

if TYPE_CHECKING:
    from nnsight_engine.envoys.cache_misses import CacheMisses
    from nnsight_engine.interleaving.threads import ThreadMediator
    from nnsight_engine.vllm_backend.traces.board import Board
    from nnsight_engine.vllm_backend.traces.caches import RequestCache

logger = logging.getLogger(__name__)

_OF_THE_MODEL = frozenset({Events.VALUE, Events.SWAP, Events.SKIP})


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSpan:
    """A traced request's rows in one step.

    Attributes:
        request_id: vLLM's id.
        index: Place of the request among the step's.
        row: First row.
        num_rows: How many.
        start: Absolute position of the first.
        complete: Whether a token is sampled after the step.
    """

    request_id: str
    index: int
    row: int
    num_rows: int
    start: int
    complete: bool


class TracedRequest(Interleaver):
    """The model's side of one request's block.

    Attributes:
        number: The generation step that is running, or comes next.
        done: Positions below this one have been computed, and shown to the block.
        in_step: Whether the request takes part in the engine's step.
        start: Position of the first row of the step that the block has not seen.
        num_new: How many of these there are.
        partial: Whether the step computes a part of the prompt only, and not its end.
        muted: The module whose call the block skips, while it runs for others.
        holdings: The bytes that it holds.
        caches: What the block keeps of many modules.
        cache_misses: What each of its caches was asked for and did not get.
        last_label: What the block that ran last is called in errors; None for the request's own.
        is_rehearsal: Whether the request ends as soon as its blocks have nothing new to ask for. A block that
            is in a loop over all steps is left there, since what follows may count on all of them.
        max_spent_s: Seconds that its blocks may compute in all steps.
        is_elsewhere: Whether, by the last step, its blocks want what no tap provides.
        went_elsewhere: Whether they did in this step.
        tier: ``tap`` while the compiled step sufficed, ``eager`` once a step ran with modules heard of.
    """

    batcher: FlatBatcher

    def __init__(
        self,
        board: Board,
        mediator: ThreadMediator,
        order: int,
        holdings: Holdings,
        edits: Sequence[ThreadMediator] = (),
    ) -> None:
        """Stand beside ``board``'s other requests; nothing runs before ``open``.

        Args:
            board: Where the model's calls come from.
            mediator: Runs the request's block.
            order: Which of all requests this is.
            holdings: Counts what it holds.
            edits: Run the edits that the request chose; they have each value before the block.
        """
        self.board = board
        self.order = order
        self.number = 0
        self.done = 0
        self.in_step = False
        self.partial = False
        self.muted: str | None = None
        self.mediator = mediator
        self.holdings = holdings
        self.caches = RequestCaches(holdings)
        self.cache_misses: list[CacheMisses] = []
        self._ended_early: list[str] = []
        self.last_label: str | None = None
        self.is_rehearsal = False
        self.max_spent_s = math.inf
        self.is_elsewhere = self.went_elsewhere = False
        self.tier = "tap"
        self._has_rehearsed = False
        self._span: TraceSpan | None = None
        self._chunks = PromptChunks(self)
        self._skips: dict[str, Any] = {}
        self._writes = PastWrites(self)
        self.start = self.num_new = self._index = 0
        self._behind = False
        super().__init__()
        self.wanted = _Wanted(self)
        self.calls = _Calls(self)
        self.initialize([*edits, mediator], batcher=FlatBatcher(board.place))

    # One worker has one board, and one block runs at a time.

    @property
    def current(self) -> Mediator | None:
        """The block that is running, of any request."""
        return self.board.current

    @current.setter
    def current(self, mediator: Mediator | None) -> None:
        self.board.current = mediator

    @property
    def listener(self) -> int:
        """The thread whose calls of modules are the model's own."""
        return self.board.listener

    @listener.setter
    def listener(self, thread: int) -> None:
        self.board.listener = thread

    # A life.

    def open(self) -> None:
        """Run the block until it first waits."""
        self.interleaving = True
        self._refill()
        self._guarded(self._open)

    def _open(self) -> None:
        for mediator in self.mediators:
            if not self._has_failed:
                mediator.start(self)
                self._settle()  # it may have been the last to come to a barrier

    def _refill(self) -> None:
        """Let every block compute for as long as one step allows."""
        for mediator in self.mediators:
            cast("ThreadMediator", mediator).refill()

    def begin(self, span: TraceSpan, total_rows: int) -> None:
        """Take part in a step.

        Args:
            span: The request's rows in it.
            total_rows: Rows of the step, all requests' together.
        """
        self.in_step, self._behind, self._index = True, False, span.index
        self._span, self.went_elsewhere = span, False
        self._refill()
        self.caches.begin()
        replayed = min(max(self.done - span.start, 0), span.num_rows)
        self.start, self.num_new = span.start + replayed, span.num_rows - replayed
        self.partial = not span.complete
        self.batcher.place(total_rows)
        self._own(span.row + replayed, self.num_new)
        self._writes.begin(span.row, span.start, replayed)
        if self.num_new:
            self.step = self.number
            self._guarded(self._begin_step)

    def again(self) -> None:
        """The step is run again from its first layer: what was written in it is to be written again."""
        span = self._span
        assert span is not None  # noqa: S101 - a step is running
        self._writes.begin(span.row, span.start, span.num_rows)

    def _begin_step(self) -> None:
        for mediator in self._waiting():
            kind, _, number, _ = mediator.waiting or (None, None, None, None)
            if kind is Events.STEP and number is not None and number <= self.number:
                mediator.respond(value=True)
                self._settle()

    def _own(self, row: int, num_rows: int) -> None:
        self.batcher.group = (row, num_rows)
        for mediator in self.mediators:
            mediator.batch_group = (row, num_rows)

    def after_model(self, num_requests: int) -> None:
        """From here on, values have one row per request."""
        self.batcher.place(num_requests)
        self._own(self._index, 1)
        self._behind = True

    def end(self) -> None:
        """Leave the step."""
        self.in_step = False
        self.is_elsewhere = self.went_elsewhere
        if self.board.is_uncompiled:
            self.tier = "eager"
        self._writes.end()
        if self.spent_s > self.max_spent_s and not self.is_over:
            self.failed(TimeBudgetError(f"The block ran longer than {self.max_spent_s:g} s in all steps."))
            self.wanted.clear()
        if self.num_new:
            self.done = self.start + self.num_new
            if self.partial:
                self._chunks.num_passed += 1
            else:
                self.number += 1
                self._has_rehearsed = self.is_rehearsal and all(map(_asks_nothing_new, self.mediators))
                self._chunks.clear()
                self.caches.end()

    def close(self, result: Any) -> None:
        """The request is over: give the block what the request returned, and end it."""
        self._refill()
        self._guarded(lambda: self._finish(result))
        if self.error is None:
            self._guarded(lambda: self.holdings.check(is_last=True))
        self._guarded(self._end)
        self.board.forget(self)

    def _finish(self, result: Any) -> None:
        if not self.is_over:
            self.end_steps()
            self.handle("result", result)
            self.check_dangling_mediators()

    @property
    def spent_s(self) -> float:
        """Seconds for which the engine has waited for the request's blocks."""
        return sum(cast("ThreadMediator", mediator).spent_s for mediator in self.mediators)

    def warnings(self) -> list[str]:
        """Return what whoever wrote the block is to be warned of, once the request is over."""
        misses = (cache.warning() for cache in self.cache_misses)
        return [*self._ended_early, *(miss for miss in misses if miss is not None)]

    def warn(self, error: StepNotReachedError) -> None:
        """Record the warning for the client, who gets it with what the block saved."""
        self._ended_early.append(f"{error} The block ends here.")

    def retire(self) -> None:
        """No further step comes: nothing is computed anew any more."""
        self._writes.clear()
        self._chunks.clear()
        self.caches.end()

    @property
    def is_over(self) -> bool:
        """Whether the request should end, because its block failed or stopped it, or has rehearsed."""
        return self._has_failed or self._has_rehearsed

    @property
    def _has_failed(self) -> bool:
        return self.error is not None or self.stopped

    def failed(self, error: BaseException) -> None:
        """Take note that a block failed, and say which if it is not the request's own."""
        if self.last_label is not None and self.error is None:
            BaseException.add_note(
                error, f"This was in {self.last_label}, which the request runs beside its own block."
            )
        super().failed(error)

    def _guarded(self, act: Callable[[], Any]) -> None:
        """Let nothing out that a block, or what it asked for, raises."""
        try:
            act()
        except Exception as error:
            logger.debug("a traced request failed", exc_info=True)
            self.failed(error)
            self.wanted.clear()

    def _settle(self) -> None:
        while self.released and self.error is None:
            self.released.pop(0).respond()
        if self._has_failed and not self.ending:
            self.wanted.clear()

    # What blocks wait for.

    def queue(self, mediator: Mediator) -> Any:
        """Let a block wait for what it asked for, see ``Interleaver``."""
        kind, provider, _, _ = mediator.waiting or (None, "", None, None)
        if kind in _OF_THE_MODEL:
            refusal = self.board.refusal(provider)
            if refusal is not None:
                return Raise(refusal)
        return super().queue(mediator)

    def uses(self, provider: str) -> bool:
        """Tell whether the block, or what it wrote, skipped or caches, has a use for this very call."""
        replays = self._writes.has_use_for(provider)
        return self.in_step and (replays or self.has_use_for(provider) or self.is_due(provider))

    def watch(self, watcher: Watcher, providers: Iterable[str]) -> None:
        """Let a cache see this request's rows from now on, after the blocks have.

        Raises:
            Exception: No block can have one of these values.
        """
        names = list(providers)
        for refusal in map(self.board.refusal, names):
            if refusal is not None:
                raise refusal
        self.caches.add(cast("RequestCache", watcher), names)
        for provider in names:
            self.board.want(provider, self)

    def skips(self, provider: str) -> bool:
        """Tell whether a value that the block gave is to take the place of this one."""
        return provider in self._skips

    def has_use_for(self, provider: str) -> bool:
        """Tell whether a value is of use although no block waits for it."""
        return self.skips(provider) or self.caches.has_use_for(provider)

    def release(self, provider: str) -> None:
        """Have no more use for a provider, if nothing else of this request's has one."""
        if not (provider in self.wanted or self.has_use_for(provider)):
            self.board.unwant(provider, self)

    def is_due(self, provider: str) -> bool:
        """Tell whether the block waits for this very call."""
        if not (self.in_step and self.num_new) or self.muted is not None or (self._behind and self.partial):
            return False
        return bool(self.due(provider))

    def due(self, provider: str) -> list[Mediator]:
        """Return the blocks that wait for this very call, in the order in which they are answered."""
        now = (self.number, None)
        return [one for one in self.wanted.get(provider, ()) if one.waiting and one.waiting[2] in now]

    # What the model provides.

    def arrive(self, provider: str) -> None:
        """Put in what the block wrote before, or skips the module with; before it may have the value."""
        if self.in_step:
            self._guarded(lambda: self._arrive(provider))

    def _arrive(self, provider: str) -> None:
        self._writes.put_back(provider)
        if self.skips(provider):
            self._put_skipped(provider)

    def serve(self, provider: str) -> None:
        """Let the block have the value at hand, which it waits for."""
        try:
            if self.partial:
                self._chunks.serve_part(provider)
            elif self._chunks.num_passed and not self._behind:
                self._chunks.serve_last(provider)
                self._settle()
            else:
                self._serve_whole(provider)
        except Exception as error:
            logger.exception("a value could not be shared with a traced request")
            self.failed(error)
            self.wanted.clear()

    def leave(self, provider: str) -> None:
        """The model goes on: what the block does from now on with what it was given is its own affair."""
        if self.batcher.changed:
            self._guarded(lambda: self._note_written(provider))
        self.holdings.give(self.batcher.lent_bytes)
        self.batcher.loans, self.batcher.changed = None, False
        self._guarded(lambda: self._chunks.leave(provider))
        self._guarded(self.holdings.check)

    def watch_pass(self, provider: str) -> None:
        """Let the caches see the value at hand, as all blocks have left it."""
        if not self.caches.has_use_for(provider) or not (self.in_step and self.num_new):
            return
        if self.is_over or (self._behind and self.partial):
            return
        if self.muted in {None, provider.removesuffix(".input")}:
            self.last_label = None  # a cache is the own block's
            self._guarded(lambda: self._note_cached(provider))

    def _note_cached(self, provider: str) -> None:
        chunk = 0 if self._behind else self._chunks.num_passed
        rows = map_tensors(self.batcher.current_value, self._own_rows)
        self.caches.note(provider, rows, chunk, is_last=not self.partial)

    def _own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        axis = self.batcher.axis(tensor)
        with torch.inference_mode(mode=False):
            return tensor if axis is None else tensor.narrow(axis, *self.batcher.group)

    def _serve_whole(self, provider: str) -> None:
        outer, self.providing = self.providing, (provider, self._number_of(provider))
        try:
            self._serve_all(*self.providing)
        finally:
            self.providing = outer
        for _, skip in self.skipped:  # the module runs all the same, for the others
            self._skip(provider, skip)
        self.skipped.clear()

    def _number_of(self, provider: str) -> int | None:
        waiting = self.wanted.get(provider, ())
        return (
            None
            if any(one.waiting is not None and one.waiting[2] is None for one in waiting)
            else self.number
        )

    def _skip(self, provider: str, value: Any) -> None:
        self.muted = provider.removesuffix(".input")
        exit_ = f"{self.muted}.output"
        self._skips[exit_] = value
        self.board.want(exit_, self)

    def _put_skipped(self, provider: str) -> None:
        skip = self._skips.pop(provider)
        self.muted = None
        self.release(provider)
        self.batcher.swap(self.batcher.group, skip)
        self._note_written(provider)
        self.batcher.changed = False

    def _note_written(self, provider: str) -> None:
        """Keep what the block left at these positions, should they be computed again."""
        if not self._behind:  # where nothing is
            self._writes.note(provider)


def _asks_nothing_new(mediator: Mediator) -> bool:
    """Tell whether a block has ended, or waits for a turn of a loop that ends where generation does."""
    event = mediator.waiting
    if event is None:
        return True
    return event[0] is Events.STEP and bool(mediator.loops and mediator.loops[-1].open_ended)


class _Wanted(dict[str, list[Mediator]]):
    """What one request's block waits for, of which the board keeps count."""

    def __init__(self, request: TracedRequest) -> None:
        super().__init__()
        self._request = request

    def __setitem__(self, provider: str, waiting: list[Mediator]) -> None:
        super().__setitem__(provider, waiting)
        self._request.board.want(provider, self._request)

    def __delitem__(self, provider: str) -> None:
        super().__delitem__(provider)
        if not self._request.has_use_for(provider):
            self._request.board.unwant(provider, self._request)

    def clear(self) -> None:
        for provider in list(self):
            del self[provider]


class _Calls(dict[str, int]):
    """How often each provider was reached: as many times as there were steps, and once more in this one."""

    def __init__(self, request: TracedRequest) -> None:
        super().__init__()
        self._request = request

    def get(self, provider: str, default: Any = 0) -> Any:  # noqa: ARG002 - dict's signature
        request = self._request
        board = request.board
        if not board.is_known(provider):
            return 0
        passed = request.in_step and not request.partial and board.has_passed(provider)
        return request.number + (1 if passed else 0)
