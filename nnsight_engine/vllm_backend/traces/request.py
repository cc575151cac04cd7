"""One traced request, over all steps of the engine in which it takes part.

Blocks refer to generation steps (``.i0`` is the whole prompt), but the engine runs *spans* of positions: a
prompt may be computed in chunks, and after a preemption all positions so far are computed again. So a value
is addressed by absolute positions. Positions that the block has seen are never shown to it again; its writes
there are replayed, or the rebuilt keys and values would lack them.

No error of a block propagates into the model: the request records its failure and is ended after the step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.interleaving.events import Events, StepNotReachedError
from nnsight_engine.interleaving.interleaver import Interleaver, Watcher
from nnsight_engine.interleaving.mediator import Mediator, Raise
from nnsight_engine.vllm_backend.traces.caches import RequestCaches
from nnsight_engine.vllm_backend.traces.memory_accounting import MemoryAccount
from nnsight_engine.vllm_backend.traces.rows import FlatBatcher
from nnsight_engine.vllm_backend.traces.spans import PromptChunks, ReplayedWrites

if TYPE_CHECKING:
    from nnsight_engine.envoys.missed_values import CacheMisses
    from nnsight_engine.interleaving.threads import ThreadMediator
    from nnsight_engine.vllm_backend.traces.caches import RequestCache
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

logger = logging.getLogger(__name__)

_OF_THE_MODEL = frozenset({Events.VALUE, Events.SWAP, Events.SKIP})


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSpan:
    """The rows of a traced request in one step; ``start`` is the absolute position of the first row.

    ``index`` is that among the step's requests; ``complete`` says whether a token is sampled after the step.
    """

    request_id: str
    index: int
    row: int
    num_rows: int
    start: int
    complete: bool


class TracedRequest(Interleaver):
    """The interleaver of one request: the model's side of its block and its edits.

    Attributes:
        order: The number of its arrival; of the requests of a step, earlier ones are served first.
        partial: Whether the step computes a chunk of the prompt that does not reach its end.
        number: The generation step that is running, or comes next.
        done: Positions below this one have been computed and shown to the block.
        start: Position of the step's first row that the block has not seen; ``num_new`` are not seen.
        muted: The module whose call the block skips while it runs for other requests.
        is_dry_run: Whether the request ends as soon as its blocks have nothing new to ask for. A block in a
            loop over all steps is left there, since the code behind the loop may rely on all of them.
        tier: ``tap`` while the compiled step sufficed, ``eager`` once a step ran with module calls observed.
    """

    batcher: FlatBatcher

    def __init__(
        self,
        dispatcher: TraceDispatcher,
        mediator: ThreadMediator,
        order: int,
        memory: MemoryAccount,
        edits: Sequence[ThreadMediator] = (),
    ) -> None:
        """Register with the dispatcher; no block runs before ``open``. Edits receive each value first."""
        self.dispatcher = dispatcher
        self.order = order
        self.number = 0
        self.done = 0
        self.in_step = False
        self.partial = False
        self.muted: str | None = None
        self.mediator = mediator
        self.memory = memory
        self.caches = RequestCaches(memory)
        self.cache_misses: list[CacheMisses] = []
        self._ended_early: list[str] = []
        self._last_run: Mediator | None = None
        self.is_dry_run = False
        self.needed_modules = self.needs_modules = False
        self.tier = "tap"
        self._dry_run_is_complete = False
        self._span: TraceSpan | None = None
        self._chunks = PromptChunks(self)
        self._skips: dict[str, Any] = {}
        self._writes = ReplayedWrites(self)
        self.start = self.num_new = self._index = 0
        self._is_after_model = False
        super().__init__([*edits, mediator], batcher=FlatBatcher(dispatcher.place))

    # One worker has one dispatcher, and one block runs at a time.

    @property
    def current(self) -> Mediator | None:
        """The running block, of any request."""
        return self.dispatcher.current

    @current.setter
    def current(self, mediator: Mediator | None) -> None:
        self.dispatcher.current = mediator
        if mediator is not None and mediator.interleaver is self:
            self._last_run = mediator

    @property
    def listener(self) -> int:
        """The id of the thread whose module calls are the model's own."""
        return self.dispatcher.listener

    @listener.setter
    def listener(self, thread: int) -> None:
        self.dispatcher.listener = thread

    # Lifecycle.

    def start_blocks(self) -> None:
        self.interleaving = True
        self._refill()
        self._guarded(self._start_mediators)

    def _start_mediators(self) -> None:
        for mediator in self.mediators:
            if not self._has_failed:
                mediator.start(self)
                self._settle()  # it may have been the last to reach a barrier

    def _refill(self) -> None:
        for mediator in self.mediators:
            cast("ThreadMediator", mediator).refill()

    def begin_step(self, span: TraceSpan, total_rows: int) -> None:
        """Begin a step of ``total_rows`` rows, of which ``span`` is this request's; replay seen ones."""
        self.in_step, self._is_after_model, self._index = True, False, span.index
        self._span, self.needs_modules = span, False
        self._refill()
        self.caches.begin_step()
        replayed = min(max(self.done - span.start, 0), span.num_rows)
        self.start, self.num_new = span.start + replayed, span.num_rows - replayed
        self.partial = not span.complete
        self.batcher.set_num_rows(total_rows)
        self._set_rows(span.row + replayed, self.num_new)
        self._writes.begin_step(span.row, span.start, replayed)
        if self.num_new:
            self.step = self.number
            self._guarded(self._begin_step)

    def again(self) -> None:
        """Prepare to rerun the step from its first layer: writes already made in it are to be replayed."""
        span = self._span
        assert span is not None  # noqa: S101 - a step is running
        self._writes.begin_step(span.row, span.start, span.num_rows)

    def _begin_step(self) -> None:
        """Continue the blocks that wait, in a loop over steps, for this generation step."""
        for mediator in self._waiting():
            kind, _, number, _ = mediator.waiting or (None, None, None, None)
            if kind is Events.STEP and number is not None and number <= self.number:
                mediator.respond(value=True)
                self._settle()

    def _set_rows(self, row: int, num_rows: int) -> None:
        self.batcher.group = (row, num_rows)
        for mediator in self.mediators:
            mediator.batch_group = (row, num_rows)

    def after_model(self, num_requests: int) -> None:
        """Switch to the phase behind the model, in which values have one row per request."""
        self.batcher.set_num_rows(num_requests)
        self._set_rows(self._index, 1)
        self._is_after_model = True

    def end_step(self) -> None:
        """End the step: count its positions as done, and its generation step if a token was sampled."""
        self.in_step = False
        self.needed_modules = self.needs_modules
        if self.dispatcher.is_uncompiled:
            self.tier = "eager"
        self._writes.end_step()
        if self.num_new:
            self.done = self.start + self.num_new
            if self.partial:
                self._chunks.num_passed += 1
            else:
                self.number += 1
                self._dry_run_is_complete = self.is_dry_run and all(map(_asks_nothing_new, self.mediators))
                self._chunks.clear()
                self.caches.drop_parts()

    def close(self, result: Any) -> None:
        """End the block after its request has ended; give it the request's result if it waits for it."""
        self._refill()
        self._guarded(lambda: self._finish(result))
        if self.error is None:
            self._guarded(lambda: self.memory.check(is_last=True))
        self._guarded(self._end_run)
        self.dispatcher.forget(self)

    def _finish(self, result: Any) -> None:
        """Continue the blocks that wait for the end or the result; a block that waits for a value fails."""
        if not self.is_over:
            self.end_steps()
            self.handle("result", result)
            self.check_dangling_mediators()

    @property
    def index(self) -> int:
        return self._index

    @property
    def spent_s(self) -> float:
        return sum(cast("ThreadMediator", mediator).spent_s for mediator in self.mediators)

    def warnings(self) -> list[str]:
        misses = (cache.warning() for cache in self.cache_misses)
        return [*self._ended_early, *(miss for miss in misses if miss is not None)]

    def warn(self, error: StepNotReachedError) -> None:
        self._ended_early.append(f"{error} The block ends here.")

    def retire(self) -> None:
        """Drop data stored for later steps: no further step follows, and no position is computed again."""
        self._writes.clear()
        self._chunks.clear()
        self.caches.drop_parts()

    @property
    def is_over(self) -> bool:
        """Whether the request should end: its block failed or stopped it, or its rehearsal is complete."""
        return self._has_failed or self._dry_run_is_complete

    @property
    def _has_failed(self) -> bool:
        return self.error is not None or self.stopped

    def failed(self, error: BaseException) -> None:
        """Record that a block failed, with a note that names the block if it is not the request's own."""
        edit = self._last_run
        if edit is not None and edit is not self.mediator and self.error is None:
            BaseException.add_note(
                error, f"This was in {edit.name}, which the request runs beside its own block."
            )
        super().failed(error)

    def reclaim_values(self) -> None:
        self._guarded(self.batcher.reclaim)

    def _guarded(self, act: Callable[[], Any]) -> None:
        """Call ``act``; an error ends the request's blocks, since none may reach the model."""
        try:
            act()
        except Exception as error:
            logger.debug("a traced request failed", exc_info=True)
            self.failed(error)
            self._stop_waiting()

    def _settle(self) -> None:
        """Answer blocks that a barrier has released; after a failure, serve none any more."""
        while self.released and self.error is None:
            self.released.pop(0).respond()
        if self._has_failed and not self.ending:
            self._stop_waiting()

    # Requests of blocks.

    def queue(self, mediator: Mediator) -> Any:
        """Queue a block for its request; return an answer if there is one at once, otherwise ``NOTHING``."""
        kind, provider, _, _ = mediator.waiting or (None, "", None, None)
        if kind in _OF_THE_MODEL:
            refusal = self.dispatcher.refusal(provider)
            if refusal is not None:
                return Raise(refusal)
        answer = super().queue(mediator)
        if provider in self.wanted:
            self.dispatcher.want(provider, self)
        return answer

    def unqueue(self, mediator: Mediator) -> None:
        provider = "" if mediator.waiting is None else mediator.waiting[1]
        super().unqueue(mediator)
        self.release(provider)

    def _stop_waiting(self) -> None:
        """Have no block served any more: the request has failed or ended."""
        for provider in list(self.wanted):
            del self.wanted[provider]
            self.release(provider)

    def num_calls(self, provider: str) -> int:
        """Return how often a provider was reached: once per earlier step, and once more if in this one."""
        if not self.dispatcher.is_known(provider):
            return 0
        passed = self.in_step and not self.partial and self.dispatcher.has_passed(provider)
        return self.number + (1 if passed else 0)

    def uses(self, provider: str) -> bool:
        replays = self._writes.has_use_for(provider)
        return self.in_step and (replays or self.has_use_for(provider) or self.is_due(provider))

    def watch(self, watcher: Watcher, providers: Iterable[str]) -> None:
        """Fill a cache with the rows as blocks leave them; raises if no block can have one of the values."""
        names = list(providers)
        for refusal in map(self.dispatcher.refusal, names):
            if refusal is not None:
                raise refusal
        self.caches.add(cast("RequestCache", watcher), names)
        for provider in names:
            self.dispatcher.want(provider, self)

    def skips(self, provider: str) -> bool:
        return provider in self._skips

    def has_use_for(self, provider: str) -> bool:
        """Return whether a value is used although no block waits for it."""
        return self.skips(provider) or self.caches.has_use_for(provider)

    def release(self, provider: str) -> None:
        if not (provider in self.wanted or self.has_use_for(provider)):
            self.dispatcher.unwant(provider, self)

    def is_due(self, provider: str) -> bool:
        """Return whether a block waits for the value at hand, and is to have it.

        Not if all rows were seen, a block skips the module, or the value follows a part of a prompt.
        """
        if (
            not (self.in_step and self.num_new)
            or self.muted is not None
            or (self._is_after_model and self.partial)
        ):
            return False
        return bool(self.waiting_for(provider))

    def waiting_for(self, provider: str) -> list[Mediator]:
        """Return the blocks that wait for this call of a provider, in the order of being answered."""
        due_calls = (self.number, None)  # None: whichever call comes next
        return [
            mediator
            for mediator in self.wanted.get(provider, ())
            if mediator.waiting and mediator.waiting[2] in due_calls
        ]

    # Values that the model provides.

    def arrive(self, provider: str) -> None:
        if self.in_step:
            self._guarded(lambda: self._arrive(provider))

    def _arrive(self, provider: str) -> None:
        self._writes.put_back(provider)
        if self.skips(provider):
            self._put_skipped(provider)

    def serve(self, provider: str) -> None:
        """Give the value at hand to the blocks that wait for it, as rows of a whole prompt or of a chunk."""
        try:
            if self.partial:
                self._chunks.serve_part(provider)
            elif self._chunks.num_passed and not self._is_after_model:
                self._chunks.serve_last(provider)
                self._settle()
            else:
                self._serve_whole(provider)
        except Exception as error:
            logger.exception("a value could not be shared with a traced request")
            self.failed(error)
            self._stop_waiting()

    def refuse(self, provider: str, error: BaseException) -> None:
        del provider
        self.failed(error)
        self._stop_waiting()

    def leave(self, provider: str) -> None:
        """Let the model continue with the value: store what was written for replays, and check the memory."""
        if self.batcher.changed:
            self._guarded(lambda: self._note_written(provider))
        self.memory.count_given(self.batcher.lent_bytes)
        self.batcher.loans, self.batcher.changed = None, False
        self._guarded(lambda: self._chunks.check_unedited(provider))
        self._guarded(self.memory.check)

    def watch_pass(self, provider: str) -> None:
        """Copy the request's rows, as blocks have left them, into the caches that watch the provider."""
        if not self.caches.has_use_for(provider) or not (self.in_step and self.num_new):
            return
        if self.is_over or (self._is_after_model and self.partial):
            return
        if self.muted in {None, provider.removesuffix(".input")}:
            self._last_run = None  # a cache belongs to the request's own block
            self._guarded(lambda: self._note_cached(provider))

    def _note_cached(self, provider: str) -> None:
        chunk = 0 if self._is_after_model else self._chunks.num_passed
        rows = map_tensors(self.batcher.current_value, self._own_rows)
        self.caches.note(provider, rows, chunk, is_last=not self.partial)

    def _own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        axis = self.batcher.axis(tensor)
        with torch.inference_mode(mode=False):
            return tensor if axis is None else tensor.narrow(axis, *self.batcher.group)

    def _serve_whole(self, provider: str) -> None:
        """Serve all blocks that wait for the value, and begin to skip its module if one of them says so."""
        outer, self.providing = self.providing, (provider, self._number_of(provider))
        try:
            self._serve_all(*self.providing)
        finally:
            self.providing = outer
        for _, skip in self.skipped:  # the module still runs, for the other requests
            self._skip(provider, skip)
        self.skipped.clear()

    def _number_of(self, provider: str) -> int | None:
        """Return the call number that is served; None if a block waits for whichever call comes next."""
        waiting = self.wanted.get(provider, ())
        if any(waiter.waiting is not None and waiter.waiting[2] is None for waiter in waiting):
            return None
        return self.number

    def _skip(self, provider: str, value: Any) -> None:
        """Have ``value`` replace this request's rows of the module's output, once that has run for others."""
        self.muted = provider.removesuffix(".input")
        output = f"{self.muted}.output"
        self._skips[output] = value
        self.dispatcher.want(output, self)

    def _put_skipped(self, provider: str) -> None:
        """Replace the request's rows of a skipped module's output by the value that the block gave."""
        skip = self._skips.pop(provider)
        self.muted = None
        self.release(provider)
        self.batcher.swap(self.batcher.group, skip)
        self._note_written(provider)
        self.batcher.changed = False

    def _note_written(self, provider: str) -> None:
        if not self._is_after_model:  # values behind the model are not computed again
            self._writes.note(provider)


def _asks_nothing_new(mediator: Mediator) -> bool:
    """Return whether a block has ended, or waits in a loop that only ends when generation does."""
    event = mediator.waiting
    if event is None:
        return True
    return event[0] is Events.STEP and bool(mediator.loops and mediator.loops[-1].open_ended)
