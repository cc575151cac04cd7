"""The worker's side of one sandboxed trace: what its process wants of the model is offered to it.

To the board, a cell is what a ``TracedRequest`` is: somebody who waits for values and may change them. It
stands for all requests of one trace, since these share variables. A process that dies or says what no honest
one says is ended, and its requests fail.

One that is asked something and does not answer while the step may wait is *deferred*: the step goes on
without its requests, whose rows of that step count for nothing. Once it has answered, they are computed
again: what it changed before is changed again, its answer is taken at the place where the step left it, and
from there on it takes part as ever. So a block sees each value once, as if the step had waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from nnsight_engine.core.trees import tensors
from nnsight_engine.remote_backend.incoming_blocks import failure_of, outcome_of
from nnsight_engine.remote_backend.prints import MAX_BYTES
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.serialization import encode, encode_error
from nnsight_engine.serialization.message import Piece
from nnsight_engine.serialization.values import encode_pieces
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.reporting import Parcel
from nnsight_engine.vllm_backend.traces.sandboxed.changes import Changes
from nnsight_engine.vllm_backend.traces.sandboxed.connection import SandboxConnection
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    Begin,
    Broken,
    Collect,
    Collected,
    End,
    Go,
    Offer,
    Passed,
    StepMessage,
    Tensors,
    ValueSlot,
    slots_of,
)
from nnsight_engine.vllm_backend.traces.stages.row_payloads import KeptRows, RowKeeper, RowPayloads

if TYPE_CHECKING:
    from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox
    from nnsight_engine.vllm_backend.traces.request import TraceSpan
    from nnsight_engine.vllm_backend.traces.sandboxed.module_policy import CallableModules
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

_MAX_SAID: Final = 2000
_MAX_MISFITS: Final = 500
"""Steps in a row that have not the rows of the deferred one, after which its trace has failed."""
_SHARED: Final = (
    "`{}` holds a tensor that belongs to all requests of the step together, so a sandboxed block cannot have "
    "it. Ask for the value of a module around it."
)


class Opened(NamedTuple):
    """What traces are run with, see ``Cells.open``."""

    server: ForkServer
    served: CallableModules
    places: frozenset[str]
    max_bytes: int


class SandboxSession:
    """One trace's process, as the board knows it.

    Args:
        board: Where the model's calls come from.
        sandbox: The process.
        opened: What it is run with.
        order: Which of all requests its first one is.
        tenant: Whose code runs in it.
        budget_s: Seconds that its blocks may compute within one step, all together.
        trace_s: Seconds that they may in all steps.

    Attributes:
        entries: Its requests.
        live: Those whose blocks are still of use.
        talk: What is said to the process.
        finished: Requests that have ended, of which the process has not been told.
        undone: Requests whose rows of the running step count for nothing.
        is_deferred: Whether the process is in a step that went on without it.
        can_be_deferred: Whether the running step can go on without it.
        is_elsewhere: Whether, by the last step, its blocks want what no tap provides.
        went_elsewhere: Whether they did in this step.
        tier: How its steps ran, see ``TracedRequest``.
    """

    partial = False

    def __init__(
        self,
        board: TraceDispatcher,
        sandbox: Sandbox,
        opened: Opened,
        order: int,
        tenant: str,
        budget_s: float,
        trace_s: float,
    ) -> None:
        """Stand for a process in which nothing has run yet."""
        self.board = board
        self.order = order
        self.tenant = tenant
        self.entries: dict[str, TraceEntry] = {}
        self.live: set[str] = set()
        self._misfits = 0
        self.talk = SandboxConnection(
            sandbox, board, opened.served, opened.max_bytes, budget_s, trace_s, on_end=lambda: self._want([])
        )
        self.in_step = False
        self.finished: set[str] = set()
        self.undone: list[str] = []
        self.is_deferred = False
        self.can_be_deferred = False
        self._arrived: list[tuple[str, TraceEntry]] = []
        self._places = opened.places
        self._max_bytes = opened.max_bytes
        self._wanted: list[str] = []
        self._before: list[str] = []
        self._passed: list[str] = []
        self._unsaid = Passed()
        self._over: set[str] = set()
        self._news: dict[str, Parcel] = {}
        self._parcels: RowPayloads | None = None
        self._is_behind = False
        self._spans: list[TraceSpan] = []
        self._is_served = False
        self._at = ""
        self._is_resuming = self._replays = self._takes_part = False
        self._offered: set[str] = set()
        self._num_printed = 0
        self._collected: Collected | None = None
        self._is_whole = False
        self.is_elsewhere = self.went_elsewhere = False
        self.tier = "tap"
        self._changes = Changes(opened.max_bytes)

    @property
    def error(self) -> Exception | None:
        """Why the process was ended before its time."""
        return self.talk.error

    # What is said to the process.

    def begin(self, arrived: Sequence[tuple[str, TraceEntry]]) -> None:
        """Tell of requests that came; they are read while the worker goes on."""
        self.entries.update(arrived)
        self.live.update(name for name, _ in arrived)
        self._arrived += arrived
        for _ in arrived:
            self.talk.allow_reading()
        self._tell_arrived()

    def _tell_arrived(self) -> None:
        if not self._arrived or self.talk.is_unanswered or self.is_deferred:
            return
        arrived, self._arrived = self._arrived, []
        self.talk.ask(Begin([(name, entry.to_plain()) for name, entry in arrived]), [], Go, self._have_begun)

    def _have_begun(self, reply: Go) -> None:
        """The process has read what it was told of; requests that failed at once are to end."""
        self._go(reply)
        if reply.live is not None:
            told = self.live - {name for name, _ in self._arrived}
            self._over |= told.difference(reply.live)
            self.live -= self._over
        self._tell_arrived()

    def prepare(self, spans: Sequence[TraceSpan], *, is_bound: bool) -> None:
        """A step is about to begin; see ``step``."""
        self._tell_arrived()
        self.can_be_deferred = not is_bound and all(span.complete for span in spans)
        self.undone = []
        self._takes_part = False

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> None:
        """Begin a step, or go on with the one that was deferred."""
        spans = [span for span in spans if span.request_id in self.live]
        if not spans or self.error is not None:
            return
        if self.is_deferred and not self._is_same(spans):
            return
        if self.talk.is_pending:
            self.undone = [span.request_id for span in spans]
            return
        if not self.is_deferred:
            self._before, self._passed = self._passed, []
            self._spans = list(spans)
            self._offered.clear()
            self._at = ""
        self._parcels = RowPayloads(self._spans, num_rows)
        self._is_behind = self.went_elsewhere = False
        self.in_step = self._takes_part = True
        self._replays = False
        if self.is_deferred:
            self._resume()
            return
        told = [(span.request_id, span.num_rows, span.start, span.complete) for span in spans]
        self.talk.refill()
        self.talk.ask(StepMessage(told, self._take_finished(), self._unsaid), [], Go, self._go)
        self._unsaid = Passed()

    def _is_same(self, spans: Sequence[TraceSpan]) -> bool:
        """Tell whether a step is the one that was deferred, computed again; put its rows in their order."""
        now = {span.request_id: span for span in spans}
        self._misfits += 1
        if self._misfits > _MAX_MISFITS or any(
            span.request_id not in self.live or now.get(span.request_id, span).start != span.start
            for span in self._spans
        ):
            self.talk.give_up(SandboxEndedError.unrepeated())
            return False
        if [one.num_rows for one in self._spans] != [
            now[one.request_id].num_rows if one.request_id in now else 0 for one in self._spans
        ]:
            self.undone = list(now)
            return False
        self._misfits = 0
        self._spans = [now.pop(span.request_id) for span in self._spans]
        self.undone = list(now)  # those that have come since
        return True

    def _resume(self) -> None:
        """Go on at the place where the step went on without the process."""
        self.is_deferred = False
        self._replay()
        if self._at:
            self._is_resuming = True
        else:
            self.talk.take_held()

    def defer(self) -> None:
        """Let the step go on without the process, which has not answered yet."""
        if self.in_step and self.talk.is_pending:
            self.in_step = self._takes_part = False
            self.is_deferred = self.talk.is_held = True
            self.undone = [span.request_id for span in self._spans]

    def again(self) -> None:
        """The step is run again from its first layer: what was changed in it is to be changed again."""
        if not self._takes_part:
            return
        if self._changes.is_too_much:
            self.talk.give_up(SandboxEndedError.unrepeated())
        self._replay()

    def _replay(self) -> None:
        """Change again, when the model comes by, what was changed in this step."""
        self._replays = True
        for provider in self._changes.by_place:
            self.board.want(provider, self)  # type: ignore[arg-type] # stands for the requests of a trace

    def _take_finished(self) -> list[str]:
        finished, self.finished = self.finished, set()
        return list(finished)

    @property
    def is_idle(self) -> bool:
        """Whether none of its requests is running, or has failed before it could."""
        return not (self.live or self._over)

    @property
    def waiting(self) -> set[str]:
        """The requests that cannot go on before the process has answered."""
        return set(self.live) if self.talk.is_pending else set()

    def after_model(self, num_requests: int) -> None:
        """From here on, values have one row per request."""
        rows = [
            type(span)(span.request_id, at, span.index, 1, 0, complete=True)
            for at, span in enumerate(self._spans)
        ]
        self._is_behind = True
        self._parcels = RowPayloads(rows, num_requests)

    def finish(self) -> None:
        """Tell the process that the step is over."""
        if self._is_resuming:  # the model has not come to the place again
            self._is_resuming = self.in_step = False
            self.talk.give_up(SandboxEndedError.unrepeated())
        elif self.in_step:
            self.in_step = False
            self.talk.ask(End(self._newly_passed()), [], Go, self._have_ended)
        elif self._takes_part:
            self._unsaid = self._newly_passed()

    def _have_ended(self, reply: Go) -> None:
        self._go(reply)
        self._note(reply)
        self._tell_arrived()

    def end(self) -> None:
        """Leave the step."""
        if not self._takes_part:
            return
        self._takes_part = False
        self.is_elsewhere = self.went_elsewhere
        if self.board.is_uncompiled:
            self.tier = "eager"
        self._spans = []
        for provider in self._changes.by_place.keys() - set(self._wanted):
            self.board.unwant(provider, self)  # type: ignore[arg-type] # as above
        self._changes.clear()

    def take_news(self) -> tuple[list[str], dict[str, Parcel]]:
        """Return the requests that are to end, and what is to be told of any."""
        if self.error is not None:
            self._over |= self.live
        over, self._over = self._over, set()
        news, self._news = self._news, {}
        self.live.difference_update(over)
        return list(over), news

    def _note(self, reply: Go) -> None:
        """Take note of what came of a step."""
        self._over |= self.live.intersection(reply.ended)
        for told in reply.told:
            entry = self.entries.get(told.request_id)
            self._num_printed += len(told.printed)
            if self._num_printed > 2 * MAX_BYTES:  # an honest one stops at half of that
                self.talk.give_up(SandboxEndedError.broken("it printed without end"))
            elif entry is not None:
                self._news[told.request_id] = (entry.key, entry.index, told.data, told.printed)

    def _go(self, reply: Go) -> None:
        """Take note of where the process wants to stop, and whether the step is over for it."""
        if reply.wanted is not None:
            self._want(reply.wanted)
        if reply.is_over and self.in_step:
            self.in_step = False
            self._note(reply)

    def ask_saved(self, key: str, results: Mapping[str, Any], index: int | None) -> None:
        """Ask what the trace, or one of its blocks, has saved, unless that has been asked."""
        if self._collected is not None or self.talk.is_unanswered:
            return
        self.talk.refill()
        self._is_whole = index is None
        collect = Collect(key, dict(results), index, self._take_finished())
        self.talk.ask(collect, [], Collected, self._have_collected)

    def _have_collected(self, reply: Collected) -> None:
        self._collected = reply

    @property
    def has_collected(self) -> bool:
        """Whether there is an answer to ``ask_saved``, or there will be none."""
        return self._collected is not None or self.error is not None

    def saved(self, index: int | None) -> tuple[list[Piece], tuple[str, str]]:
        """Return what ``ask_saved`` asked for as pieces of a message, and what was printed last."""
        head, self._collected = self._collected, None
        if head is not None:
            content, self.talk.content = self.talk.content, memoryview(b"")
            return [content], (head.printed[:MAX_BYTES], head.failure[:_MAX_SAID])
        told = encode_error(self.error or SandboxEndedError.gone())
        blocks = [
            outcome_of(entry.index, {}, told, choice=entry.choice_of(name))
            for name, entry in self.entries.items()
            if index in {None, entry.index}
        ]
        return [encode({"blocks": blocks, "before": None})], ("", failure_of(blocks))

    def stop_waiting(self) -> None:
        """The trace is over: no step comes in which it would go on."""
        if self.is_deferred:
            self.is_deferred = False
            self.talk.drop_answer()

    def close(self) -> Sandbox | None:
        """Let go of the process; returns it if it has done all that it was told, and ends it otherwise."""
        self._want([])
        self.board.forget(self)  # type: ignore[arg-type] # as above
        self.live.clear()
        if self._is_whole and self.error is None and not self.talk.is_unanswered:
            return self.talk.sandbox
        self.talk.sandbox.end()
        return None

    def _want(self, wanted: Sequence[str]) -> None:
        """Note at which places the process waits."""
        now = {provider: None for provider in wanted if provider in self._places}
        for provider in self._wanted:
            if provider not in now:
                self.board.unwant(provider, self)  # type: ignore[arg-type] # stands for the requests of a trace
        for provider in now:
            self.board.want(provider, self)  # type: ignore[arg-type] # the same
        self._wanted = list(now)

    def _newly_passed(self) -> Passed:
        """Return the places that the model has passed and the process has not been told of."""
        told, now = len(self._passed), self.board.passed()
        same = told
        while same < len(now) and same < len(self._before) and now[same] == self._before[same]:
            same += 1
        self._passed = now
        return Passed(same, now[same:])

    # What the board asks, as of a ``TracedRequest``.

    def uses(self, provider: str) -> bool:
        """Tell whether the process has a use for a value."""
        if self._is_resuming:
            return self.in_step and (provider == self._at or provider in self._changes.by_place)
        return self.in_step and provider in self._wanted

    def arrive(self, provider: str) -> None:
        """Take note that the model is at a place, and change it as before if the step is run again."""
        self._is_served = False
        if self._replays and self._takes_part and self.error is None and provider in self._changes.by_place:
            slots, content = self._changes.by_place[provider]
            self._put(slots, content)

    def is_due(self, provider: str) -> bool:
        """Tell whether the process is to have the value at hand."""
        is_wanted = provider == self._at if self._is_resuming else provider in self._wanted
        return self.in_step and self.error is None and not self._is_served and is_wanted

    def serve(self, provider: str) -> None:
        """Offer the process the value at hand; what it changes is taken when it has answered."""
        self._is_served = True
        if self._is_resuming:
            self._is_resuming = False
            self.talk.take_held()
            return
        if provider in self._offered:  # for the second time, where the step cannot be left and come back to
            self.can_be_deferred = False
        self._offered.add(provider)
        self._at = provider
        parcels, value = self._parcels, self.board.place.value
        assert parcels is not None  # noqa: S101 - a step is running
        try:
            packed_value, forms = parcels.pack(RowKeeper().keep(value))
            is_shared = not parcels.is_all and any(axis < 0 for axis, _ in forms)
            reason = _SHARED.format(provider) if is_shared else ""
            slots, is_tuple, body = slots_of(packed_value) or (None, False, [])
            if slots is None and not is_shared:
                body = encode_pieces(packed_value, reference=KeptRows.reference)
        except Exception as error:  # noqa: BLE001 - whatever the value is made of
            reason = f"`{provider}` cannot be given to a sandboxed block: {error}"
        if reason:
            self.talk.ask(Broken(provider, self._newly_passed(), reason), [], Go, self._go)
            return
        offer = Offer(provider, self._newly_passed(), self._is_behind, slots, is_tuple)
        self.talk.ask(offer, body, Go, self._have_answered)

    def _have_answered(self, reply: Go) -> None:
        """Take what the process has changed of the value at hand."""
        self._go(reply)
        if reply.changes and self._put(reply.changes, self.talk.content):
            self._changes.keep(self._at, reply.changes, self.talk.content)
            if self._changes.is_too_much:
                self.can_be_deferred = False
        self.talk.content = memoryview(b"")

    def _put(self, changes: Sequence[ValueSlot], content: memoryview) -> bool:
        """Put what the process has changed into the value at hand; returns whether it could be."""
        parcels, keeper = self._parcels, RowKeeper()
        assert parcels is not None  # noqa: S101 - a step is running
        try:
            kept = keeper.keep(self.board.place.value)
            self.board.place.value = keeper.give_back(self._changed(parcels, kept, changes, content))
        except SandboxEndedError as error:
            self.talk.give_up(error)
        except Exception as error:  # noqa: BLE001 - no number that a process sends may end the model
            self.talk.give_up(SandboxEndedError.broken(f"it changed a value, but {error}"))
        return self.error is None

    def _changed(
        self, parcels: RowPayloads, value: Any, slots: Sequence[ValueSlot], content: memoryview
    ) -> Any:
        """Return the model's value with what the process has changed in it.

        Raises:
            SandboxEndedError: It cannot be put there.
        """
        given, before = Tensors(content), list(tensors(value))
        changes: dict[int, torch.Tensor] = {}
        for slot in slots:
            rows = given.next(slot)
            if not 0 <= slot.number < len(before) or slot.number in changes:
                raise SandboxEndedError.broken("it changed a value that there is not")
            if tuple(rows.shape) != parcels.shape_of(before[slot.number]):
                raise SandboxEndedError.broken("it changed rows that are not its own")
            if not before[slot.number].is_floating_point():
                self.board.place.check(rows.to(before[slot.number].dtype))
            changes[slot.number] = rows
        given.end()
        with torch.inference_mode():
            changed = parcels.changed(value, list(changes.items()))
        for old, new in zip(before, list(tensors(changed)), strict=True):
            for copy in self.board.place.copies:
                if copy.whole is old:
                    copy.whole = new
        return changed

    def leave(self, provider: str) -> None:
        """Do nothing: copies and caches are the process's own affair."""

    watch_pass = leave


__all__ = ["Opened", "SandboxSession"]
