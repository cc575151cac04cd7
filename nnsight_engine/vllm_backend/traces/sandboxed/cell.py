"""The worker's side of one sandboxed trace: what its process wants of the model is offered to it.

To the board, a cell is what a ``TracedRequest`` is: somebody who waits for values and may change them. It
stands for all requests of one trace, since these share variables. A process that is late, dies or says what
no honest one says is ended, and its requests fail; the worker never waits for one longer than its share of a
step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch

from nnsight_engine.core.trees import map_tensors, tensors
from nnsight_engine.remote_backend.prints import MAX_BYTES
from nnsight_engine.remote_backend.received import failure_of, outcome_of
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.sandboxed.changes import Changes
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    Begin,
    Broken,
    Call,
    Collect,
    Collected,
    End,
    Go,
    Offer,
    Passed,
    Returned,
    Slot,
    Step,
    Tensors,
    ToSandbox,
    packed,
    read_by_worker,
    slots_of,
)
from nnsight_engine.vllm_backend.traces.stages.parcels import Keeper, Kept, Parcels
from nnsight_engine.vllm_backend.traces.telling import Parcel
from nnsight_engine.wire import encode, encode_error
from nnsight_engine.wire.message import Piece
from nnsight_engine.wire.values import encode_pieces

if TYPE_CHECKING:
    from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox
    from nnsight_engine.vllm_backend.traces.board import Board
    from nnsight_engine.vllm_backend.traces.request import TraceSpan
    from nnsight_engine.vllm_backend.traces.sandboxed.served import ServedModules

logger = logging.getLogger(__name__)

_GRACE_S: Final = 0.25
"""For a sandbox to interrupt a block itself, which tells its author where it was."""
_READ_S: Final = 0.02
"""For a sandbox to read one request's block, beside what all blocks may compute in a step."""
_MAX_SAID: Final = 2000
_SHARED: Final = (
    "`{}` holds a tensor that belongs to all requests of the step together, so a sandboxed block cannot have "
    "it. Ask for the value of a module around it."
)


_T = TypeVar("_T")
_Answer = TypeVar("_Answer", bound=Go | Collected)


class Opened(NamedTuple):
    """What traces are run with, see ``Cells.open``."""

    server: ForkServer
    served: ServedModules
    places: frozenset[str]
    max_bytes: int


class Cell:
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
        error: Why it was ended before its time.
        spent_s: Seconds for which the worker has waited for it, see ``take_spent``.
        finished: Requests that have ended, of which the process has not been told.
        is_elsewhere: Whether, by the last step, its blocks want what no tap provides.
        went_elsewhere: Whether they did in this step.
        tier: How its steps ran, see ``TracedRequest``.
    """

    partial = False

    def __init__(
        self,
        board: Board,
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
        self.error: Exception | None = None
        self.in_step = False
        self.spent_s = 0.0
        self.finished: set[str] = set()
        self._sandbox = sandbox
        self._cpu_s = 0.0
        self._served = opened.served
        self._places = opened.places
        self._budget_s = budget_s
        self._trace_s = trace_s
        self._left_s = 0.0
        self._max_bytes = opened.max_bytes
        self._deadline = 0.0
        self.take_spent()  # what it computed before is not this trace's
        self.refill()
        self._is_waiting = False
        self._wanted: list[str] = []
        self._before: list[str] = []
        self._passed: list[str] = []
        self._unsaid = Passed()
        self._over: set[str] = set()
        self._news: dict[str, Parcel] = {}
        self._parcels: Parcels | None = None
        self._is_behind = False
        self._spans: list[TraceSpan] = []
        self._is_served = False
        self._num_printed = 0
        self._is_collected = False
        self._content = memoryview(b"")
        self.is_elsewhere = self.went_elsewhere = False
        self.tier = "tap"
        self._changes = Changes(opened.max_bytes)

    # What is said to the process.

    def begin(self, arrived: Sequence[tuple[str, TraceEntry]]) -> None:
        """Tell of requests that came; they are read while the worker goes on, see ``_settle``."""
        self._settle()
        self.entries.update(arrived)
        self.live.update(name for name, _ in arrived)
        self._left_s += _READ_S * len(arrived)
        self._guarded(lambda: self._send(Begin([(name, entry.to_plain()) for name, entry in arrived])))
        self._is_waiting = self.error is None

    def _settle(self) -> None:
        """Wait until the process has read what it was told of; requests that failed at once are to end."""
        if not self._is_waiting:
            return
        self._is_waiting = False
        reply = self._guarded(lambda: self._reply(Go))
        if reply is not None and reply.live is not None:
            self._over |= self.live.difference(reply.live)
            self.live.intersection_update(reply.live)

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> None:
        """Begin a step."""
        self._settle()
        spans = [span for span in spans if span.request_id in self.live]
        if not spans or self.error is not None:
            return
        self._before, self._passed = self._passed, []
        self._spans = list(spans)
        self._parcels = Parcels(self._spans, num_rows)
        self._is_behind = self.went_elsewhere = False
        self.in_step = True
        told = [(span.request_id, span.num_rows, span.start, span.complete) for span in spans]
        self._go(Step(told, self._take_finished(), self._unsaid))
        self._unsaid = Passed()

    def again(self) -> None:
        """The step is run again from its first layer: what was changed in it is to be changed again."""
        if self._changes.is_too_much:
            self._give_up(SandboxEndedError.unrepeated())
        for provider in self._changes.by_place:
            self.board.want(provider, self)  # type: ignore[arg-type] # stands for the requests of a trace

    def _take_finished(self) -> list[str]:
        finished, self.finished = self.finished, set()
        return list(finished)

    @property
    def is_idle(self) -> bool:
        """Whether none of its requests is running, or has failed before it could."""
        return not (self.live or self._over)

    def after_model(self, num_requests: int) -> None:
        """From here on, values have one row per request."""
        rows = [
            type(span)(span.request_id, at, span.index, 1, 0, complete=True)
            for at, span in enumerate(self._spans)
        ]
        self._is_behind = True
        self._parcels = Parcels(rows, num_requests)

    def end(self) -> tuple[list[str], dict[str, Parcel]]:
        """End the step; returns the requests that are to end, and what is to be told of any."""
        if self.in_step:
            self.in_step = False
            reply = self._go(End(self._newly_passed()))
            if reply is not None:
                self._note(reply)
        elif self._spans:
            self._unsaid = self._newly_passed()
        if self._spans:
            self.is_elsewhere = self.went_elsewhere
            if self.board.is_uncompiled:
                self.tier = "eager"
        self._spans = []
        for provider in self._changes.by_place.keys() - set(self._wanted):
            self.board.unwant(provider, self)  # type: ignore[arg-type] # as above
        self._changes.clear()
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
                self._give_up(SandboxEndedError.broken("it printed without end"))
            elif entry is not None:
                self._news[told.request_id] = (entry.key, entry.index, told.data, told.printed)

    def collect(
        self, key: str, results: Mapping[str, Any], index: int | None
    ) -> tuple[list[Piece], tuple[str, str]]:
        """Return what the trace, or one of its blocks, has saved as pieces of a message, and its prints."""
        self._settle()
        self.refill()
        head = self._say(Collected, Collect(key, dict(results), index, self._take_finished()))
        if head is not None:
            self._is_collected = index is None
            content, self._content = self._content, memoryview(b"")
            return [content], (head.printed[:MAX_BYTES], head.failure[:_MAX_SAID])
        error = self.error or SandboxEndedError.gone()
        told = encode_error(error)
        blocks = [
            outcome_of(entry.index, {}, told, choice=entry.choice_of(name))
            for name, entry in self.entries.items()
            if index in {None, entry.index}
        ]
        return [encode({"blocks": blocks, "before": None})], ("", failure_of(blocks))

    def close(self) -> Sandbox | None:
        """Let go of the process; returns it if it has done all that it was told, and ends it otherwise."""
        self._want([])
        self.live.clear()
        if self._is_collected and self.error is None:
            return self._sandbox
        self._sandbox.end()
        return None

    def refill(self) -> None:
        """Let the blocks compute for as long as one step allows, all of them together: a step begins."""
        self._left_s = min(self._budget_s + _GRACE_S, self._trace_s)

    def take_spent(self) -> float:
        """Return the seconds that the trace took since last asked: the worker's, or the process's own."""
        self._count_cpu()
        spent_s, self.spent_s = self.spent_s, 0.0
        return spent_s

    def _count_cpu(self) -> None:
        with contextlib.suppress(OSError):  # it is gone: what it used last is not known
            before, self._cpu_s = self._cpu_s, self._sandbox.cpu_s()
            self.spent_s = max(self.spent_s, self._cpu_s - before)

    def _say(self, answer: type[_Answer], head: ToSandbox, body: Sequence[Piece] = ()) -> _Answer | None:
        """Say something, and return the answer; None if the process is at its end."""

        def say() -> _Answer:
            self._send(head, body)
            return self._reply(answer)

        return self._guarded(say)

    def _go(self, head: ToSandbox, body: Sequence[Piece] = ()) -> Go | None:
        """Say something to which the answer is to go on."""
        reply = self._say(Go, head, body)
        if reply is not None and reply.is_over and self.in_step:
            self.in_step = False
            self._note(reply)
        return reply

    def _guarded(self, act: Callable[[], _T]) -> _T | None:
        """Speak with the process, and end it if that fails; None if it is at its end."""
        if self.error is not None:
            return None
        started = time.monotonic()
        self._deadline = started + self._left_s
        try:
            return act()
        except TimeoutError:
            is_long = self._trace_s <= time.monotonic() - started
            self._give_up(SandboxEndedError.long() if is_long else SandboxEndedError.late(self._budget_s))
        except SandboxEndedError as error:
            self._give_up(error)
        except OSError:
            self._give_up(SandboxEndedError.gone())
        except ValueError as error:  # too large to be said
            self._give_up(error)
        except Exception as error:  # noqa: BLE001 - nothing that a process does may end the engine's step
            self._give_up(SandboxEndedError.broken(f"what it said is of no use: {error}"))
        finally:
            spent_s = time.monotonic() - started
            self._left_s -= spent_s
            self._trace_s -= spent_s
            self.spent_s += spent_s
        return None

    def _send(self, head: ToSandbox, body: Sequence[Piece] = ()) -> None:
        self._sandbox.side.send(packed(head, body), self._deadline)

    def _reply(self, answer: type[_Answer]) -> _Answer:
        """Make the calls that the block wants, and return the answer to what was said last."""
        while True:
            reply, content = read_by_worker(self._sandbox.side.receive(self._deadline, self._max_bytes))
            if not isinstance(reply, Call):
                break
            self._sandbox.side.send(self._called(reply, content), self._deadline)
        if not isinstance(reply, answer):
            raise SandboxEndedError.broken("it answered something else than it was asked")
        if isinstance(reply, Go) and reply.wanted is not None:
            self._want(reply.wanted)
        if isinstance(reply, Collected) or reply.changes:
            self._content = content
        elif content:
            raise SandboxEndedError.broken("it sent bytes that nobody asked for")
        return reply

    def _called(self, call: Call, content: memoryview) -> list[bytes | memoryview]:
        """Call a module for the block; returns the answer."""
        listener, self.board.listener = self.board.listener, 0
        try:
            given = Tensors(content)
            args = [given.next(one) if isinstance(one, Slot) else one for one in call.args]
            kwargs = {
                name: given.next(one) if isinstance(one, Slot) else one for name, one in call.kwargs.items()
            }
            value = map_tensors(self._served.call(call.path, args, kwargs), lambda one: plain(one).cpu())
            return packed(Returned(), encode_pieces(Keeper().keep(value), reference=Kept.reference))
        except SandboxEndedError:
            raise
        except Exception as error:  # noqa: BLE001 - raised in the block
            return packed(Returned(encode_error(error)))
        finally:
            self.board.listener = listener

    def _give_up(self, error: Exception) -> None:
        """End the process before its time; its requests fail."""
        logger.info("a sandbox was ended: %s", error)
        self.error = error
        self._count_cpu()
        self._sandbox.end()
        self._want([])

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
        return self.in_step and provider in self._wanted

    def arrive(self, provider: str) -> None:
        """Take note that the model is at a place, and change it as before if the step is run again."""
        self._is_served = False
        if provider in self._changes.by_place and not self.board.by_taps:
            slots, self._content = self._changes.by_place[provider]
            keeper = Keeper()
            self._put(keeper, keeper.keep(self.board.place.value), slots)

    def is_due(self, provider: str) -> bool:
        """Tell whether the process is to have the value at hand."""
        return self.in_step and self.error is None and not self._is_served and provider in self._wanted

    def serve(self, provider: str) -> None:
        """Let the process have the value at hand, and take what it changes."""
        self._is_served = True
        parcels, place = self._parcels, self.board.place
        assert parcels is not None  # noqa: S101 - a step is running
        keeper = Keeper()
        try:
            kept = keeper.keep(place.value)
            packed_value, forms = parcels.pack(kept)
            is_shared = not parcels.is_all and any(axis < 0 for axis, _ in forms)
            reason = _SHARED.format(provider) if is_shared else ""
            slots, is_tuple, body = slots_of(packed_value) or (None, False, [])
            if slots is None and not is_shared:
                body = encode_pieces(packed_value, reference=Kept.reference)
        except Exception as error:  # noqa: BLE001 - whatever the value is made of
            reason = f"`{provider}` cannot be given to a sandboxed block: {error}"
        if reason:
            self._go(Broken(provider, self._newly_passed(), reason))
            return
        offer = Offer(provider, self._newly_passed(), self._is_behind, slots, is_tuple)
        reply = self._go(offer, body)
        if reply is not None and reply.changes:
            content = self._content
            self._put(keeper, kept, reply.changes)
            if self.board.by_taps and not self._is_behind and self.error is None:
                self._changes.keep(provider, reply.changes, content)

    def _put(self, keeper: Keeper, kept: Any, changes: Sequence[Slot]) -> None:
        """Put what the process has changed into the value at hand."""
        parcels = self._parcels
        assert parcels is not None  # noqa: S101 - a step is running
        try:
            self.board.place.value = keeper.give_back(self._changed(parcels, kept, changes))
        except SandboxEndedError as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001 - no number that a process sends may end the model
            self._give_up(SandboxEndedError.broken(f"it changed a value, but {error}"))
        self._content = memoryview(b"")

    def _changed(self, parcels: Parcels, value: Any, slots: Sequence[Slot]) -> Any:
        """Return the model's value with what the process has changed in it.

        Raises:
            SandboxEndedError: It cannot be put there.
        """
        given, before = Tensors(self._content), list(tensors(value))
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
        """Do nothing: what the process does with a copy is its own affair."""

    def watch_pass(self, provider: str) -> None:
        """Do nothing: its caches are its own."""


__all__ = ["Cell", "Opened"]
