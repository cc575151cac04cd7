"""The worker's side of one sandboxed trace: offers its process the model's values that the blocks want.

A session represents all requests of one trace, since these share variables. A process that dies or violates
the protocol is ended, and its requests fail. So is one that reports values not requested, or prints without
end: it would fill the engine's memory.

A process that does not answer within the step's budget is *deferred*: the step continues without its
requests, whose rows of that step are discarded. Once it has answered, the rows are computed again: its
earlier changes are replayed, its answer is applied at the place where the step left it, and from there on it
takes part normally. So a block sees each value once, as if the step had waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nnsight_engine.remote_backend.unread_output import MAX_PRINTED_BYTES
from nnsight_engine.remote_backend.values.received_blocks import failure_of, outcome_of
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.serialization import encode, encode_error
from nnsight_engine.serialization.message import Piece
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.messages import End, InvalidValue, Offer, PassedPlaces, ValueSlot
from nnsight_engine.vllm_backend.traces.reporting import Report
from nnsight_engine.vllm_backend.traces.row_payloads import RowPayloads
from nnsight_engine.vllm_backend.traces.sandboxed.connection import SandboxConnection
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    BeginRequests,
    Collect,
    Collected,
    ContinueReply,
    SandboxReply,
    StepMessage,
)
from nnsight_engine.vllm_backend.traces.sandboxed.offered_values import Changes, packed_rows, put_changes

if TYPE_CHECKING:
    from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox
    from nnsight_engine.vllm_backend.traces.request import TraceSpan
    from nnsight_engine.vllm_backend.traces.sandboxed.module_calls import CallableModules
    from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import ProcessSource
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher


def _is_wanted(reply: SandboxReply, entry: TraceEntry) -> bool:
    return (entry.streams or reply.data is None) and (entry.prints or not reply.printed)


_MAX_FAILURE_CHARS: Final = 2000
_MAX_MISFITS: Final = 500
"""Limit for consecutive steps whose rows differ from the deferred one's; beyond it the trace fails."""


class Opened(NamedTuple):
    server: ForkServer
    served: CallableModules
    max_bytes: int


class SandboxSession:
    """The session of one trace's process; its blocks share ``budget_s`` per step and ``trace_s`` in all.

    Attributes:
        live: The requests whose blocks still take part in steps.
        finished: Requests that have ended, which have not been reported to the process yet.
        undone: Requests whose rows of the running step are discarded.
        is_deferred: Whether the process is still in a step that continued without it.
        can_be_deferred: Whether the running step can continue without it.
    """

    partial = False

    def __init__(
        self,
        dispatcher: TraceDispatcher,
        source: ProcessSource,
        opened: Opened,
        order: int,
        tenant: str,
        budget_s: float,
        trace_s: float,
    ) -> None:
        """Connect to a process if one is ready; ``order`` counts arrivals, of all traced requests."""
        self.dispatcher = dispatcher
        self.order = order
        self.tenant = tenant
        self.entries: dict[str, TraceEntry] = {}
        self.live: set[str] = set()
        self._misfits = 0
        self.connection = SandboxConnection(
            source,
            dispatcher,
            opened.served,
            opened.max_bytes,
            budget_s,
            trace_s,
            on_end=lambda: self._want([]),
        )
        self.in_step = False
        self.finished: set[str] = set()
        self.undone: list[str] = []
        self.is_deferred = False
        self.can_be_deferred = False
        self._arrived: list[tuple[str, TraceEntry]] = []
        self._places = opened.served.places
        self._max_bytes = opened.max_bytes
        self._wanted: list[str] = []
        self._before: list[str] = []  # places passed in the step before
        self._passed: list[str] = []  # places passed in this step that the process knows of
        self._unreported = PassedPlaces()
        self._over: set[str] = set()  # requests that ``take_deltas`` has yet to return
        self._reports: dict[str, Report] = {}
        self._num_printed = 0
        self._payloads: RowPayloads | None = None
        self._is_after_model = False
        self._spans: list[TraceSpan] = []
        self._is_served = False  # whether the process has had the value at hand
        self._stopped_at = ""  # the place of the last question in this step
        # Whether a deferred step must first reach that place again, whether changes are replayed, and whether
        # the process has a part in the running step.
        self._is_resuming = self._replays = self._takes_part = False
        self._offered: set[str] = set()
        self._collected: tuple[Collected, memoryview] | None = None
        self._is_clean = False
        self.needed_modules = self.needs_modules = False
        self.tier = "tap"
        self._changes = Changes(opened.max_bytes)

    @property
    def error(self) -> Exception | None:
        return self.connection.error

    # Messages to the process.

    def send_requests(self, arrived: Sequence[tuple[str, TraceEntry]]) -> None:
        """Send requests that arrived to the process, which decodes them while the worker continues."""
        self.entries.update(arrived)
        for _, entry in arrived:
            self.connection.adapter = entry.adapter  # all requests of a trace have the same
        self.live.update(name for name, _ in arrived)
        self._arrived += arrived
        for _ in arrived:
            self.connection.allow_reading()
        self._send_arrived()

    def _send_arrived(self) -> None:
        """Send the requests that have arrived, unless the process has yet to answer, or is in a step."""
        if not self._arrived or self.connection.is_unanswered or self.is_deferred:
            return
        arrived, self._arrived = self._arrived, []
        self.connection.send_event(
            BeginRequests([(name, entry.to_plain()) for name, entry in arrived]), self._on_begun
        )

    def _on_begun(self, reply: ContinueReply, content: memoryview) -> None:
        """Process the answer to ``BeginRequests``: requests that it does not name as live have failed."""
        self._apply(reply, content)
        if reply.live is not None:
            sent = self.live - {name for name, _ in self._arrived}
            self._over |= sent.difference(reply.live)
            self.live -= self._over
        self._send_arrived()

    def prepare(self, spans: Sequence[TraceSpan], *, is_bound: bool) -> None:
        """Decide whether the step can continue without the process; ``is_bound``: it cannot be repeated."""
        self._send_arrived()
        is_begun = self.connection.has_process  # otherwise no block has seen a part of a chunked prompt
        self.can_be_deferred = not (is_bound or (is_begun and not all(span.complete for span in spans)))
        self.undone = []
        self._takes_part = False

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> None:
        """Begin a step, or continue the one that was deferred; while the process computes, leave it out."""
        spans = [span for span in spans if span.request_id in self.live]
        if not spans or self.error is not None:
            return
        if self.is_deferred and not self._is_same(spans):
            return
        if self.connection.is_pending:
            self.undone = [span.request_id for span in spans]
            return
        if not self.is_deferred:
            self._before, self._passed = self._passed, []
            self._spans = list(spans)
            self._offered.clear()
            self._stopped_at = ""
        self._payloads = RowPayloads(self._spans, num_rows)
        self._is_after_model = self.needs_modules = False
        self.in_step = self._takes_part = True
        self._replays = False
        if self.is_deferred:
            self._resume()
            return
        span_data = [(span.request_id, span.num_rows, span.start, span.complete) for span in spans]
        self.connection.refill()
        self.connection.send_event(
            StepMessage(span_data, self._take_finished(), self._unreported), self._apply
        )
        self._unreported = PassedPlaces()

    def _is_same(self, spans: Sequence[TraceSpan]) -> bool:
        """Return whether a step recomputes the deferred one; bring its rows into the deferred order."""
        current = {span.request_id: span for span in spans}
        self._misfits += 1
        if self._misfits > _MAX_MISFITS or any(
            span.request_id not in self.live or current.get(span.request_id, span).start != span.start
            for span in self._spans
        ):
            self.connection.give_up(SandboxEndedError.unrepeated())
            return False
        if [earlier.num_rows for earlier in self._spans] != [
            current[earlier.request_id].num_rows if earlier.request_id in current else 0
            for earlier in self._spans
        ]:
            self.undone = list(current)
            return False
        self._misfits = 0
        self._spans = [current.pop(span.request_id) for span in self._spans]
        self.undone = list(current)  # requests that have arrived since
        return True

    def _resume(self) -> None:
        """Continue a deferred step: replay its changes, and use the answer at the place where it was late."""
        self.is_deferred = False
        self._replay()
        if self._stopped_at:
            self._is_resuming = True
        else:
            self.connection.take_held()

    def defer(self) -> None:
        """Let the step continue without the process if it has not answered yet."""
        if self.in_step and self.connection.is_pending:
            self.in_step = self._takes_part = False
            self.is_deferred = self.connection.is_held = True
            self.undone = [span.request_id for span in self._spans]

    def again(self) -> None:
        """Rerun the step from its first layer; the trace fails if its changes were too large to be stored."""
        if not self._takes_part:
            return
        if self._changes.is_too_much:
            self.connection.give_up(SandboxEndedError.unrepeated())
        self._replay()

    def _replay(self) -> None:
        self._replays = True
        for provider in self._changes.by_place:
            self.dispatcher.want(provider, self)

    def _take_finished(self) -> list[str]:
        finished, self.finished = self.finished, set()
        return list(finished)

    @property
    def is_idle(self) -> bool:
        return not (self.live or self._over)

    @property
    def waiting(self) -> set[str]:
        return set(self.live) if self.connection.is_pending else set()

    def after_model(self, num_requests: int) -> None:
        """Switch to the phase behind the model, in which values have one row per request."""
        rows = [
            type(span)(span.request_id, at, span.index, 1, 0, complete=True)
            for at, span in enumerate(self._spans)
        ]
        self._is_after_model = True
        self._payloads = RowPayloads(rows, num_requests)

    def finish(self) -> None:
        """Tell the process, once the model has run, that the step is over, unless it knows."""
        if self._is_resuming:  # the model has not reached the place again
            self._is_resuming = self.in_step = False
            self.connection.give_up(SandboxEndedError.unrepeated())
        elif self.in_step:
            self.in_step = False
            self.connection.send_event(End(self._newly_passed()), self._on_ended)
        elif self._takes_part:
            self._unreported = self._newly_passed()

    def _on_ended(self, reply: ContinueReply, content: memoryview) -> None:
        self._apply(reply, content)
        self._note(reply)
        self._send_arrived()

    def end_step(self) -> None:
        """End a step in which the process had a part: drop the changes stored for a rerun of it."""
        if not self._takes_part:
            return
        self._takes_part = False
        self.needed_modules = self.needs_modules
        if self.dispatcher.is_uncompiled:
            self.tier = "eager"
        self._spans = []
        for provider in self._changes.by_place.keys() - set(self._wanted):
            self.dispatcher.unwant(provider, self)
        self._changes.clear()

    def take_deltas(self) -> tuple[list[str], dict[str, Report]]:
        """Return the requests that are to end, and the reports by request, since the last call."""
        if self.error is not None:
            self._over |= self.live
        over, self._over = self._over, set()
        reports, self._reports = self._reports, {}
        self.live -= over
        return list(over), reports

    def _note(self, reply: ContinueReply) -> None:
        """Record a step's reports; end the process if it reports what was not requested."""
        self._over |= self.live.intersection(reply.ended)
        for report in reply.reports:
            entry = self.entries.get(report.request_id)
            self._num_printed += len(report.printed)
            if self._num_printed > 2 * MAX_PRINTED_BYTES:  # an unmodified process stops at half of that
                self.connection.give_up(SandboxEndedError.broken("it printed without end"))
                return
            if entry is None:
                continue
            if not _is_wanted(report, entry):  # nothing would ever read it
                self.connection.give_up(SandboxEndedError.broken("it reported what nobody asked for"))
                return
            self._reports[report.request_id] = (entry.key, entry.index, report.data, report.printed)

    def _apply(self, reply: ContinueReply, content: memoryview) -> None:  # noqa: ARG002 - has none here
        """Process an answer: want what it names; leave the step if the process needs no more of it."""
        if reply.wanted is not None:
            self._want(reply.wanted)
        if reply.is_over and self.in_step:
            self.in_step = False
            self._note(reply)

    def request_saved(self, key: str, results: Mapping[str, Any]) -> None:
        """Request the saved values of the trace, unless the process has yet to answer."""
        if self._collected is not None or self.connection.is_unanswered:
            return
        self.connection.refill()
        collect = Collect(key, dict(results), self._take_finished())
        self.connection.send_event(collect, self._on_collected)

    def _on_collected(self, reply: Collected, content: memoryview) -> None:
        self._collected = (reply, content)
        self._is_clean = reply.is_clean

    @property
    def has_collected(self) -> bool:
        return self._collected is not None or self.error is not None

    def saved(self) -> tuple[list[Piece], tuple[str, str]]:
        """Return the encoded results, and printed text and failure; the process's error if it was ended."""
        collected, self._collected = self._collected, None
        if collected is not None:
            head, content = collected
            return [content], (head.printed[:MAX_PRINTED_BYTES], head.failure[:_MAX_FAILURE_CHARS])
        error_data = encode_error(self.error or SandboxEndedError.gone())
        blocks = [
            outcome_of(entry.index, {}, error_data, choice=entry.choice_of(name))
            for name, entry in self.entries.items()
        ]
        return [encode({"blocks": blocks, "before": None})], ("", failure_of(blocks))

    def stop_waiting(self) -> None:
        """Drop a deferred answer: the trace has ended, and no step will resume it."""
        if self.is_deferred:
            self.is_deferred = False
            self.connection.drop_answer()

    def close(self) -> Sandbox | None:
        """Release the process; return it if another trace may run in it, and end it otherwise."""
        self._want([])
        self.dispatcher.forget(self)
        self.live.clear()
        if self._is_clean and self.error is None and not self.connection.is_unanswered:
            return self.connection.sandbox
        self.connection.end_process()
        return None

    def _want(self, wanted: Sequence[str]) -> None:
        """Want these places instead of those wanted so far; places that no sandbox may have are ignored."""
        available = {provider: None for provider in wanted if provider in self._places}
        for provider in self._wanted:
            if provider not in available:
                self.dispatcher.unwant(provider, self)
        for provider in available:
            self.dispatcher.want(provider, self)
        self._wanted = list(available)

    def _newly_passed(self) -> PassedPlaces:
        """Return the places passed since the last message; those as in the step before are only counted."""
        passed, num_known = self.dispatcher.passed(), len(self._passed)
        for place, place_before in zip(passed[num_known:], self._before[num_known:], strict=False):
            if place != place_before:
                break
            num_known += 1
        self._passed = passed
        return PassedPlaces(num_known, passed[num_known:])

    # The interface of a ``TracedRequest`` to the dispatcher.

    def uses(self, provider: str) -> bool:
        if self._is_resuming:
            return self.in_step and (provider == self._stopped_at or provider in self._changes.by_place)
        return self.in_step and provider in self._wanted

    def arrive(self, provider: str) -> None:
        """Apply the changes stored for this place, if the step is repeated, before blocks get the value."""
        self._is_served = False
        if self._replays and self._takes_part and self.error is None and provider in self._changes.by_place:
            slots, content = self._changes.by_place[provider]
            self._write_changes(slots, content)

    def is_due(self, provider: str) -> bool:
        is_wanted = provider == self._stopped_at if self._is_resuming else provider in self._wanted
        return self.in_step and self.error is None and not self._is_served and is_wanted

    def serve(self, provider: str) -> None:
        """Offer the value at hand to the process; its changes are applied when it has answered."""
        if self._has_stopped_at(provider):
            return
        payloads = self._payloads
        assert payloads is not None  # noqa: S101 - a step is running
        try:
            slots, is_tuple, body = packed_rows(provider, self.dispatcher.place.value, payloads)
        except SandboxedError as error:
            self._send_refusal(provider, error)
            return
        offer = Offer(provider, self._newly_passed(), slots, is_tuple, self._is_after_model)
        self.connection.send_event(offer, self._on_answered, body)

    def refuse(self, provider: str, error: BaseException) -> None:
        """Raise an error in the process's blocks for a value that they want and that cannot be provided."""
        if self.connection.is_unanswered and not self._is_resuming:
            return  # it has been asked already
        self._is_served = False  # that was an earlier place: nobody offers this one
        if self.is_due(provider) and not self._has_stopped_at(provider):
            self._send_refusal(provider, error)

    def _has_stopped_at(self, provider: str) -> bool:
        """Record that the process is asked at a place; return whether it was, before a deferral."""
        self._is_served = True
        if self._is_resuming:
            self._is_resuming = False
            self.connection.take_held()
            return True
        if provider in self._offered:  # offered twice, so the place does not identify where to resume
            self.can_be_deferred = False
        self._offered.add(provider)
        self._stopped_at = provider
        return False

    def _send_refusal(self, provider: str, error: BaseException) -> None:
        message = InvalidValue(provider, self._newly_passed(), encode_error(error))
        self.connection.send_event(message, self._apply)

    def _on_answered(self, reply: ContinueReply, content: memoryview) -> None:
        """Apply an answer, and store its changes in case that the step is repeated."""
        self._apply(reply, content)
        if reply.changes and self._write_changes(reply.changes, content):
            self._changes.keep(self._stopped_at, reply.changes, content)
            if self._changes.is_too_much:
                self.can_be_deferred = False

    def _write_changes(self, changes: Sequence[ValueSlot], content: memoryview) -> bool:
        """Apply changes to the value at hand; return False, with the process ended, if they are invalid."""
        payloads = self._payloads
        assert payloads is not None  # noqa: S101 - a step is running
        try:
            put_changes(self.dispatcher.place, payloads, changes, content)
        except SandboxEndedError as error:
            self.connection.give_up(error)
        return self.error is None

    def leave(self, provider: str) -> None:
        """Do nothing: copies and caches are handled in the process."""

    watch_pass = leave
