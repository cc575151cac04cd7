"""The worker's side of one sandboxed trace: offers its process the model's values that the blocks want.

For the dispatcher a session has the role of a ``TracedRequest``: it waits for values and may change them. It
represents all requests of one trace, since these share variables. A process that dies or violates the
protocol is ended, and its requests fail.

A process that is asked and does not answer within the step's budget is *deferred*: the step continues without
its requests, whose rows of that step are discarded. Once it has answered, the rows are computed again: its
earlier changes are replayed, its answer is applied at the place where the step left it, and from there on it
takes part normally. So a block sees each value once, as if the step had waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from nnsight_engine.core.trees import tensors
from nnsight_engine.remote_backend.prints import MAX_BYTES
from nnsight_engine.remote_backend.values.received_blocks import failure_of, outcome_of
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.serialization import encode, encode_error
from nnsight_engine.serialization.message.table import Piece
from nnsight_engine.serialization.values import encode_pieces
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.reporting import Report
from nnsight_engine.vllm_backend.traces.sandboxed.changes import Changes
from nnsight_engine.vllm_backend.traces.sandboxed.connection import SandboxConnection
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    BeginRequests,
    Collect,
    Collected,
    ContinueReply,
    End,
    InvalidValue,
    Offer,
    PassedPlaces,
    SandboxReply,
    StepMessage,
    Tensors,
    ValueSlot,
    slots_of,
)
from nnsight_engine.vllm_backend.traces.stages.row_payloads import RowPayloads, RowsPlaceholder, RowStore

if TYPE_CHECKING:
    from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox
    from nnsight_engine.vllm_backend.traces.request import TraceSpan
    from nnsight_engine.vllm_backend.traces.sandboxed.module_policy import CallableModules
    from nnsight_engine.vllm_backend.traces.sandboxed.process_source import ProcessSource
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

_MAX_SAID: Final = 2000
_MAX_MISFITS: Final = 500
"""Limit for consecutive steps whose rows differ from the deferred one's; beyond it the trace fails."""
_SHARED: Final = (
    "`{}` holds a tensor that belongs to all requests of the step together, so a sandboxed block cannot have "
    "it. Ask for the value of a module around it."
)


class Opened(NamedTuple):
    """The resources with which traces run, see ``SandboxPool.open``."""

    server: ForkServer
    served: CallableModules
    places: frozenset[str]
    max_bytes: int


class SandboxSession:
    """The session of one trace's process, as registered with the dispatcher.

    Args:
        dispatcher: The dispatcher of the model's calls.
        source: Provides the process, at once or later.
        opened: The resources with which it runs.
        order: Position of its first request in the order of arrival.
        tenant: The tenant whose code runs in it.
        budget_s: Seconds that its blocks may compute within one step, all together.
        trace_s: Seconds that they may compute in all steps.

    Attributes:
        entries: The entries of its requests, by request id.
        live: The requests whose blocks still take part in steps.
        talk: The connection to the process.
        finished: Requests that have ended, which have not been reported to the process yet.
        undone: Requests whose rows of the running step are discarded.
        is_deferred: Whether the process is still in a step that continued without it.
        can_be_deferred: Whether the running step can continue without it.
        needed_modules: Whether its blocks needed, in the last step, values that no tap provides.
        needs_modules: Whether they need such values in this step.
        tier: How its steps ran, see ``TracedRequest``.
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
        self._places = opened.places
        self._max_bytes = opened.max_bytes
        self._wanted: list[str] = []
        self._before: list[str] = []
        self._passed: list[str] = []
        self._unreported = PassedPlaces()
        self._over: set[str] = set()
        self._reports: dict[str, Report] = {}
        self._payloads: RowPayloads | None = None
        self._is_after_model = False
        self._spans: list[TraceSpan] = []
        self._is_served = False
        self._at = ""
        self._is_resuming = self._replays = self._takes_part = False
        self._offered: set[str] = set()
        self._num_printed = 0
        self._collected: Collected | None = None
        self._is_clean = False
        self.needed_modules = self.needs_modules = False
        self.tier = "tap"
        self._changes = Changes(opened.max_bytes)

    @property
    def error(self) -> Exception | None:
        """Why the process was ended prematurely; None if it was not."""
        return self.connection.error

    # Messages to the process.

    def begin(self, arrived: Sequence[tuple[str, TraceEntry]]) -> None:
        """Send requests that arrived to the process, which decodes them while the worker continues."""
        self.entries.update(arrived)
        self.live.update(name for name, _ in arrived)
        self._arrived += arrived
        for _ in arrived:
            self.connection.allow_reading()
        self._send_arrived()

    def _send_arrived(self) -> None:
        if not self._arrived or self.connection.is_unanswered or self.is_deferred:
            return
        arrived, self._arrived = self._arrived, []
        self.connection.send_event(
            BeginRequests([(name, entry.to_plain()) for name, entry in arrived]),
            [],
            ContinueReply,
            self._on_begun,
        )

    def _on_begun(self, reply: ContinueReply) -> None:
        """Handle the answer to ``BeginRequests``; requests that failed at once are to end."""
        self._go(reply)
        if reply.live is not None:
            sent = self.live - {name for name, _ in self._arrived}
            self._over |= sent.difference(reply.live)
            self.live -= self._over
        self._send_arrived()

    def prepare(self, spans: Sequence[TraceSpan], *, is_bound: bool) -> None:
        """Prepare for the step that is about to begin; see ``step``."""
        self._send_arrived()
        is_begun = self.connection.has_process  # otherwise no block has seen a part of a chunked prompt
        self.can_be_deferred = not (is_bound or (is_begun and not all(span.complete for span in spans)))
        self.undone = []
        self._takes_part = False

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> None:
        """Begin a step, or continue the one that was deferred."""
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
            self._at = ""
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
            StepMessage(span_data, self._take_finished(), self._unreported), [], ContinueReply, self._go
        )
        self._unreported = PassedPlaces()

    def _is_same(self, spans: Sequence[TraceSpan]) -> bool:
        """Return whether a step recomputes the deferred one; bring its rows into the deferred order."""
        now = {span.request_id: span for span in spans}
        self._misfits += 1
        if self._misfits > _MAX_MISFITS or any(
            span.request_id not in self.live or now.get(span.request_id, span).start != span.start
            for span in self._spans
        ):
            self.connection.give_up(SandboxEndedError.unrepeated())
            return False
        if [one.num_rows for one in self._spans] != [
            now[one.request_id].num_rows if one.request_id in now else 0 for one in self._spans
        ]:
            self.undone = list(now)
            return False
        self._misfits = 0
        self._spans = [now.pop(span.request_id) for span in self._spans]
        self.undone = list(now)  # requests that have arrived since
        return True

    def _resume(self) -> None:
        """Continue at the place where the step left the process."""
        self.is_deferred = False
        self._replay()
        if self._at:
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
        """Prepare to rerun the step from its first layer: changes already made in it are to be replayed."""
        if not self._takes_part:
            return
        if self._changes.is_too_much:
            self.connection.give_up(SandboxEndedError.unrepeated())
        self._replay()

    def _replay(self) -> None:
        """Register the places of the changes made in this step, to replay them when the model passes."""
        self._replays = True
        for provider in self._changes.by_place:
            self.dispatcher.want(provider, self)  # type: ignore[arg-type] # stands for the requests of a trace

    def _take_finished(self) -> list[str]:
        finished, self.finished = self.finished, set()
        return list(finished)

    @property
    def is_idle(self) -> bool:
        """Whether none of its requests is running, and none that failed has yet to be ended."""
        return not (self.live or self._over)

    @property
    def waiting(self) -> set[str]:
        """The requests that cannot continue before the process has answered."""
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
        """Notify the process that the step has ended."""
        if self._is_resuming:  # the model has not reached the place again
            self._is_resuming = self.in_step = False
            self.connection.give_up(SandboxEndedError.unrepeated())
        elif self.in_step:
            self.in_step = False
            self.connection.send_event(End(self._newly_passed()), [], ContinueReply, self._on_ended)
        elif self._takes_part:
            self._unreported = self._newly_passed()

    def _on_ended(self, reply: ContinueReply) -> None:
        self._go(reply)
        self._note(reply)
        self._send_arrived()

    def end(self) -> None:
        """Leave the step."""
        if not self._takes_part:
            return
        self._takes_part = False
        self.needed_modules = self.needs_modules
        if self.dispatcher.is_uncompiled:
            self.tier = "eager"
        self._spans = []
        for provider in self._changes.by_place.keys() - set(self._wanted):
            self.dispatcher.unwant(provider, self)  # type: ignore[arg-type] # as above
        self._changes.clear()

    def take_deltas(self) -> tuple[list[str], dict[str, Report]]:
        """Return the requests that are to end, and the reports by request."""
        if self.error is not None:
            self._over |= self.live
        over, self._over = self._over, set()
        reports, self._reports = self._reports, {}
        self.live.difference_update(over)
        return list(over), reports

    def _note(self, reply: ContinueReply) -> None:
        """Record the reports and ended requests of a step."""
        self._over |= self.live.intersection(reply.ended)
        for report in reply.reports:
            entry = self.entries.get(report.request_id)
            self._num_printed += len(report.printed)
            if self._num_printed > 2 * MAX_BYTES:  # an unmodified process stops at half of that
                self.connection.give_up(SandboxEndedError.broken("it printed without end"))
            elif entry is not None and not _is_wanted(report, entry):  # nothing would ever read it
                self.connection.give_up(SandboxEndedError.broken("it reported what nobody asked for"))
            elif entry is not None:
                self._reports[report.request_id] = (entry.key, entry.index, report.data, report.printed)

    def _go(self, reply: ContinueReply) -> None:
        """Record the places that the process wants, and whether the step has ended for it."""
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
        self.connection.send_event(collect, [], Collected, self._on_collected)

    def _on_collected(self, reply: Collected) -> None:
        self._collected = reply
        self._is_clean = reply.is_clean

    @property
    def has_collected(self) -> bool:
        """Whether ``request_saved`` has been answered, or never will be."""
        return self._collected is not None or self.error is not None

    def saved(self) -> tuple[list[Piece], tuple[str, str]]:
        """Return the answer to ``request_saved`` as message pieces, with printed text and failure text."""
        head, self._collected = self._collected, None
        if head is not None:
            content, self.connection.content = self.connection.content, memoryview(b"")
            return [content], (head.printed[:MAX_BYTES], head.failure[:_MAX_SAID])
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
        self.dispatcher.forget(self)  # type: ignore[arg-type] # as above
        self.live.clear()
        if self._is_clean and self.error is None and not self.connection.is_unanswered:
            return self.connection.sandbox
        self.connection.end_process()
        return None

    def _want(self, wanted: Sequence[str]) -> None:
        """Register the places at which the process waits with the dispatcher."""
        now = {provider: None for provider in wanted if provider in self._places}
        for provider in self._wanted:
            if provider not in now:
                self.dispatcher.unwant(provider, self)  # type: ignore[arg-type] # stands for the requests of a trace
        for provider in now:
            self.dispatcher.want(provider, self)  # type: ignore[arg-type] # the same
        self._wanted = list(now)

    def _newly_passed(self) -> PassedPlaces:
        """Return the places that the model has passed and that were not reported to the process yet."""
        num_sent, now = len(self._passed), self.dispatcher.passed()
        same = num_sent
        while same < len(now) and same < len(self._before) and now[same] == self._before[same]:
            same += 1
        self._passed = now
        return PassedPlaces(same, now[same:])

    # The interface of a ``TracedRequest`` to the dispatcher.

    def uses(self, provider: str) -> bool:
        """Return whether the process has a use for a value."""
        if self._is_resuming:
            return self.in_step and (provider == self._at or provider in self._changes.by_place)
        return self.in_step and provider in self._wanted

    def arrive(self, provider: str) -> None:
        """Apply the replayed changes of a place that the model has reached, if the step is run again."""
        self._is_served = False
        if self._replays and self._takes_part and self.error is None and provider in self._changes.by_place:
            slots, content = self._changes.by_place[provider]
            self._put(slots, content)

    def is_due(self, provider: str) -> bool:
        """Return whether the process is to receive the value at hand."""
        is_wanted = provider == self._at if self._is_resuming else provider in self._wanted
        return self.in_step and self.error is None and not self._is_served and is_wanted

    def serve(self, provider: str) -> None:
        """Offer the value at hand to the process; its changes are applied when it has answered."""
        self._is_served = True
        if self._is_resuming:
            self._is_resuming = False
            self.connection.take_held()
            return
        if provider in self._offered:  # offered twice, so the place does not identify where to resume
            self.can_be_deferred = False
        self._offered.add(provider)
        self._at = provider
        payloads, value = self._payloads, self.dispatcher.place.value
        assert payloads is not None  # noqa: S101 - a step is running
        try:
            packed_value, forms = payloads.pack(RowStore().keep(value))
            is_shared = not payloads.is_all and any(axis < 0 for axis, _ in forms)
            reason = _SHARED.format(provider) if is_shared else ""
            slots, is_tuple, body = slots_of(packed_value) or (None, False, [])
            if slots is None and not is_shared:
                body = encode_pieces(packed_value, reference=RowsPlaceholder.reference)
        except Exception as error:  # noqa: BLE001 - whatever the value is made of
            reason = f"`{provider}` cannot be given to a sandboxed block: {error}"
        if reason:
            self.connection.send_event(
                InvalidValue(provider, self._newly_passed(), reason), [], ContinueReply, self._go
            )
            return
        offer = Offer(provider, self._newly_passed(), self._is_after_model, slots, is_tuple)
        self.connection.send_event(offer, body, ContinueReply, self._on_answered)

    def _on_answered(self, reply: ContinueReply) -> None:
        """Apply the changes of the process to the value at hand."""
        self._go(reply)
        if reply.changes and self._put(reply.changes, self.connection.content):
            self._changes.keep(self._at, reply.changes, self.connection.content)
            if self._changes.is_too_much:
                self.can_be_deferred = False
        self.connection.content = memoryview(b"")

    def _put(self, changes: Sequence[ValueSlot], content: memoryview) -> bool:
        """Apply the process's changes to the value at hand; return whether the process is still alive."""
        payloads, keeper = self._payloads, RowStore()
        assert payloads is not None  # noqa: S101 - a step is running
        try:
            kept = keeper.keep(self.dispatcher.place.value)
            self.dispatcher.place.value = keeper.give_back(self._changed(payloads, kept, changes, content))
        except SandboxEndedError as error:
            self.connection.give_up(error)
        except Exception as error:  # noqa: BLE001 - no number that a process sends may end the model
            self.connection.give_up(SandboxEndedError.broken(f"it changed a value, but {error}"))
        return self.error is None

    def _changed(
        self, payloads: RowPayloads, value: Any, slots: Sequence[ValueSlot], content: memoryview
    ) -> Any:
        """Return the model's value with the changes of the process.

        Raises:
            SandboxEndedError: The changes are invalid.
        """
        given, before = Tensors(content), list(tensors(value))
        changes: dict[int, torch.Tensor] = {}
        for slot in slots:
            rows = given.next(slot)
            if not 0 <= slot.number < len(before) or slot.number in changes:
                raise SandboxEndedError.broken("it changed a value that there is not")
            if tuple(rows.shape) != payloads.shape_of(before[slot.number]):
                raise SandboxEndedError.broken("it changed rows that are not its own")
            if not before[slot.number].is_floating_point():
                self.dispatcher.place.check(rows.to(before[slot.number].dtype))
            changes[slot.number] = rows
        given.end()
        with torch.inference_mode():
            changed = payloads.changed(value, list(changes.items()))
        for old, new in zip(before, list(tensors(changed)), strict=True):
            for copy in self.dispatcher.place.copies:
                if copy.whole is old:
                    copy.whole = new
        return changed

    def leave(self, provider: str) -> None:
        """Do nothing: copies and caches are handled in the process."""

    watch_pass = leave


def _is_wanted(report: SandboxReply, entry: TraceEntry) -> bool:
    return (entry.streams or report.data is None) and (entry.prints or not report.printed)


__all__ = ["Opened", "SandboxSession"]
