"""The worker's side of sandboxed traces: what each trace's process wants of the model is offered to it.

To the board, a cell is what a ``TracedRequest`` is: somebody who waits for values and may change them. It
stands for all requests of one trace, since these share variables. A process that is late, dies or says what
no honest one says is ended, and its requests fail; the worker never waits for one longer than its share of a
step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch

from nnsight_engine.core.trees import map_tensors, tensors
from nnsight_engine.remote_backend.prints import MAX_BYTES
from nnsight_engine.remote_backend.received import failure_of, outcome_of
from nnsight_engine.sandbox.errors import SandboxEndedError, SandboxUnavailableError
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.rows import plain
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
)
from nnsight_engine.vllm_backend.traces.sandboxed.parked import Parked
from nnsight_engine.vllm_backend.traces.stages.parcels import Keeper, Kept, Parcels
from nnsight_engine.vllm_backend.traces.telling import Parcel
from nnsight_engine.wire import encode, encode_error
from nnsight_engine.wire.message import Piece
from nnsight_engine.wire.values import encode_pieces

if TYPE_CHECKING:
    from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox
    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.traces.board import Board
    from nnsight_engine.vllm_backend.traces.request import TraceSpan
    from nnsight_engine.vllm_backend.traces.sandboxed.served import ServedModules

logger = logging.getLogger(__name__)

_GRACE_S: Final = 0.25
"""For a sandbox to interrupt a block itself, which tells its author where it was."""
_SHARED: Final = (
    "`{}` holds a tensor that belongs to all requests of the step together, so a sandboxed block cannot have "
    "it. Ask for the value of a module around it."
)


class _Open(NamedTuple):
    """What traces are run with, see ``Cells.open``."""

    server: ForkServer
    served: ServedModules
    max_bytes: int


class Cell:
    """One trace's process, as the board knows it.

    Args:
        board: Where the model's calls come from.
        sandbox: The process.
        opened: What it is run with.
        order: Which of all requests its first one is.
        tenant: Whose code runs in it.
        budget_s: Seconds that one block may compute within one step.

    Attributes:
        entries: Its requests.
        live: Those whose blocks are still of use.
        error: Why it was ended before its time.
        spent_s: Seconds for which the worker has waited for it.
    """

    partial = False

    def __init__(
        self,
        board: Board,
        sandbox: Sandbox,
        opened: _Open,
        order: int,
        tenant: str,
        budget_s: float,
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
        self._sandbox = sandbox
        self._served = opened.served
        self._budget_s = budget_s
        self._left_s = 0.0
        self._max_bytes = opened.max_bytes
        self._wanted: list[str] = []
        self._before: list[str] = []
        self._passed: list[str] = []
        self._parcels: Parcels | None = None
        self._is_behind = False
        self._spans: list[TraceSpan] = []
        self._is_served = False
        self._num_printed = 0
        self._is_collected = False
        self._content = memoryview(b"")

    # What is said to the process.

    def begin(self, arrived: Sequence[tuple[str, TraceEntry]], finished: Sequence[str]) -> None:
        """Tell of requests that came and went."""
        self.entries.update(arrived)
        self._refill()
        told = [(name, entry.to_plain()) for name, entry in arrived]
        reply = self._say(Begin(told, list(finished)))
        if isinstance(reply, Go) and reply.live is not None:
            self.live = self.entries.keys() & set(reply.live)

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Begin a step; returns whether some block takes part in it."""
        self._refill()
        self._before, self._passed = self._passed, []
        self._spans = list(spans)
        self._parcels = Parcels(self._spans, num_rows)
        self._is_behind = False
        self.in_step = True
        self._say(Step([(span.request_id, span.num_rows, span.start, span.complete) for span in spans]))
        return self.error is None

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
        self.in_step = False
        news: dict[str, Parcel] = {}
        ended: list[str] = []
        reply = self._say(End(self._newly_passed()))
        if isinstance(reply, Go):
            ended = [name for name in reply.ended if name in self.live]
            for told in reply.told:
                entry = self.entries.get(told.request_id)
                self._num_printed += len(told.printed)
                if self._num_printed > 2 * MAX_BYTES:  # an honest one stops at half of that
                    self._give_up(SandboxEndedError.broken("it printed without end"))
                elif entry is not None:
                    news[told.request_id] = (entry.key, entry.index, told.data, told.printed)
        if self.error is not None:
            ended = list(self.live)
        self.live.difference_update(ended)
        return ended, news

    def collect(
        self, key: str, results: Mapping[str, Any], index: int | None
    ) -> tuple[list[Piece], tuple[str, str]]:
        """Return what the trace, or one of its blocks, has saved as pieces of a message, and its prints."""
        self._refill()
        head = self._say(Collect(key, dict(results), index))
        if isinstance(head, Collected) and self.error is None:
            self._is_collected = index is None
            return [self._content], (head.printed, head.failure)
        error = self.error or SandboxEndedError.gone()
        told = encode_error(error)
        blocks = [
            outcome_of(entry.index, {}, told, choice=choice_of(name, entry))
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

    def _refill(self) -> None:
        """Let the blocks compute for as long as one step allows."""
        self._left_s = self._budget_s + _GRACE_S

    def _say(self, head: ToSandbox, body: Sequence[Piece] = ()) -> Go | Collected | None:
        """Say something, make the calls that the block wants, and return the answer; None if it is over."""
        if self.error is not None:
            return None
        started = time.monotonic()
        deadline = started + self._left_s
        try:
            self._sandbox.side.send(packed(head, body), deadline)
            while True:
                data = self._sandbox.side.receive(deadline, self._max_bytes)
                reply, content = read_by_worker(data)
                if not isinstance(reply, Call):
                    break
                self._sandbox.side.send(self._called(reply, content), deadline)
            if isinstance(reply, Go) and reply.wanted is not None:
                self._want(reply.wanted)
            self._content = content
        except TimeoutError:
            self._give_up(SandboxEndedError.late(self._budget_s))
        except SandboxEndedError as error:
            self._give_up(error)
        except OSError:
            self._give_up(SandboxEndedError.gone())
        except ValueError as error:  # too large to be said
            self._give_up(error)
        else:
            return reply
        finally:
            spent_s = time.monotonic() - started
            self._left_s -= spent_s
            self.spent_s += spent_s
        return None

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
        self._sandbox.end()
        self._want([])

    def _want(self, wanted: Sequence[str]) -> None:
        """Note at which places the process waits."""
        now = dict.fromkeys(wanted)
        for provider in self._wanted:
            if provider not in now:
                self.board.unwant(provider, self)  # type: ignore[arg-type] # stands for the requests of a trace
        for provider in now:
            self.board.want(provider, self)  # type: ignore[arg-type] # the same
        self._wanted = list(now)

    def _newly_passed(self) -> Passed:
        """Return the places that the model has passed and the process has not been told of."""
        told, now = len(self._passed), list(self.board.calls)
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
        """Take note that the model is at a place."""
        del provider
        self._is_served = False

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
            body = [] if is_shared else encode_pieces(packed_value, reference=Kept.reference)
        except Exception as error:  # noqa: BLE001 - whatever the value is made of
            reason, body = f"`{provider}` cannot be given to a sandboxed block: {error}", []
        if reason:
            self._say(Broken(provider, self._newly_passed(), reason))
            return
        reply = self._say(Offer(provider, self._newly_passed(), self._is_behind), body)
        if isinstance(reply, Go) and reply.changes:
            try:
                place.value = keeper.give_back(self._changed(parcels, kept, reply.changes))
            except SandboxEndedError as error:
                self._give_up(error)

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
            changes[slot.number] = rows
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


def choice_of(request_id: str, entry: TraceEntry) -> int:
    """Return which of its request's ``n`` a request is: vLLM names these <choice>_<parent>."""
    return int(request_id.partition("_")[0]) if entry.num_choices > 1 else 0


class Cells:
    """All sandboxed traces of a worker.

    Args:
        board: Where the model's calls and the requests meet.
        limits: What blocks may use.
    """

    def __init__(self, board: Board, limits: EngineLimits) -> None:
        """Start without any, and with no process to run one in before ``open``."""
        self._board = board
        self._limits = limits
        self._open: _Open | None = None
        self._by_key: dict[str, Cell] = {}
        self._by_request: dict[str, Cell] = {}
        self._left: dict[str, tuple[str, str]] = {}
        self._active: list[Cell] = []
        self._parked = Parked()

    def open(self, server: ForkServer, served: ServedModules, max_bytes: int) -> None:
        """Run traces from now on.

        Args:
            server: Gives out processes.
            served: Calls modules for them.
            max_bytes: Of an answer.
        """
        self._open = _Open(server, served, max_bytes)

    @property
    def is_open(self) -> bool:
        """Whether traces are run."""
        return self._open is not None

    @property
    def is_ready(self) -> bool:
        """Whether a process waits for work.

        Raises:
            SandboxUnavailableError: They cannot be started.
        """
        return self._open is not None and self._open.server.is_ready

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._by_key)

    @property
    def idle(self) -> bool:
        """Whether no request is running."""
        return not any(cell.live for cell in self._by_key.values())

    def arrive(self, request_id: str, entry: TraceEntry, order: int) -> bool:
        """Let a request's blocks begin; returns whether it is alive then.

        Raises:
            SandboxUnavailableError: There is no process for it.
        """
        cell = self._by_key.get(entry.key)
        if cell is None:
            if len(self._by_key) >= self._limits.max_sandboxes:
                raise SandboxUnavailableError(
                    f"{len(self._by_key)} sandboxes are at work, as many as may be: send the request again"
                )
            if self._open is None:
                raise SandboxUnavailableError("no sandbox has been started: send the request again")
            sandbox = self._parked.take(entry.sandbox_of) or self._open.server.take()
            cell = Cell(
                self._board, sandbox, self._open, order, entry.sandbox_of, self._limits.sandbox_step_s
            )
            self._by_key[entry.key] = cell
        self._by_request[request_id] = cell
        cell.begin([(request_id, msgspec.structs.replace(entry, sandbox_of=""))], ())
        return request_id in cell.live

    def finish(self, finished: set[str]) -> None:
        """Let go of requests that have ended."""
        for cell in list(self._by_key.values()):
            ended = finished & cell.live
            if ended:
                cell.begin((), list(ended))

    def has(self, request_id: str) -> bool:
        """Tell whether a request is one of these, and its block still of use."""
        cell = self._by_request.get(request_id)
        return cell is not None and request_id in cell.live

    def knows(self, key: str) -> bool:
        """Tell whether a trace is one of these."""
        return key in self._by_key

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Begin a step for these requests; returns whether some block takes part in it."""
        by_cell: dict[Cell, list[TraceSpan]] = {}
        for span in spans:
            by_cell.setdefault(self._by_request[span.request_id], []).append(span)
        for cell, own in by_cell.items():
            cell.step(own, num_rows)
        self._active = list(by_cell)
        return bool(self._active)

    @property
    def in_step(self) -> bool:
        """Whether some block takes part in the running step."""
        return bool(self._active)

    def after_model(self, num_requests: int) -> None:
        """From here on, values have one row per request."""
        for cell in self._active:
            cell.after_model(num_requests)

    def end(self) -> tuple[list[str], dict[str, Parcel]]:
        """End the step; returns the requests that are to end, and what is to be told of any."""
        ended: list[str] = []
        news: dict[str, Parcel] = {}
        for cell in self._active:
            over, told = cell.end()
            ended += over
            news |= told
        self._active = []
        return ended, news

    def collect(self, key: str, results: Mapping[str, Any], index: int | None) -> tuple[list[Piece], float]:
        """Return what a trace or one of its blocks has saved, and the seconds that it took since last asked.

        Without a block the trace is over.
        """
        cell = self._by_key[key]
        pieces, left = cell.collect(key, results, index)
        spent_s, cell.spent_s = cell.spent_s, 0.0
        if index is None:
            self._left[key] = left
            self._forget(key)
        return pieces, spent_s

    def drop(self, key: str) -> float:
        """End a trace that nobody will collect; returns the seconds that it took."""
        cell = self._by_key.get(key)
        if cell is not None:
            self._forget(key)
        self._left.pop(key, None)
        return 0.0 if cell is None else cell.spent_s

    def take_left(self, key: str) -> tuple[str, str] | None:
        """Return what a trace printed last and how it failed; None of one that is not of these."""
        return self._left.pop(key, None)

    def _forget(self, key: str) -> None:
        cell = self._by_key.pop(key)
        for request_id in cell.entries:
            self._by_request.pop(request_id, None)
        sandbox = cell.close()
        if sandbox is not None:
            self._parked.put(cell.tenant, sandbox)


__all__ = ["Cell", "Cells", "choice_of"]
