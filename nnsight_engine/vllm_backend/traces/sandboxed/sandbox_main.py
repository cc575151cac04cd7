"""The sandbox's side of sandboxed traces: blocks run here, on stand-ins for the model's modules.

``SandboxTraces`` is what ``WorkerTraces`` is in the worker, with everything that blocks may do, but the model
is elsewhere: the worker offers what blocks want of it, goes on with what it gets back, and calls modules for
them, as stages of a pipeline do for each other (see ``stages``). Here are no weights, and of a step's rows
only those of this trace's requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import torch

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.interleaving.call_stacks import Done
from nnsight_engine.interleaving.threads import ThreadMediator, Threads, ThreadStack
from nnsight_engine.sandbox.channel import SandboxSide
from nnsight_engine.serialization import TRUSTED, Policy, decode, restore_error
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.families import ModelPoints
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.names import Names
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    Argument,
    Begin,
    Broken,
    CallRequest,
    Collect,
    Collected,
    End,
    Go,
    Offer,
    Passed,
    Returned,
    SandboxReply,
    StepMessage,
    Tensors,
    ToSandbox,
    ValueSlot,
    packed,
    read_by_sandbox,
    slot_of,
)
from nnsight_engine.vllm_backend.traces.stages.row_payloads import RemoteStageValue, RowPayloads
from nnsight_engine.vllm_backend.traces.trace_end import TraceEnd
from nnsight_engine.vllm_backend.traces.untrusted_policy import strangers_policy
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

logger = logging.getLogger(__name__)

_LEAST_S: Final = 0.001
"""Less is left of a job's time than it is worth to wait for."""
_MOST_WALL: Final = 28
"""How many times as long as it may compute a job may take: the machine is busy, or it sleeps."""
_ELSEWHERE: Final = 0
"""The only other place, where stages of a pipeline have numbers."""


class WaitingThread(ThreadStack):
    """A thread that was there before the process was confined, and takes one job after the other.

    Its time is the process's own: where the machine is busy, a job is not late because others compute.
    """

    __slots__ = ("_at_home",)

    def __init__(self, budget_s: float, at_home: list[WaitingThread]) -> None:
        """Begin to wait."""
        super().__init__(budget_s)
        self._at_home = at_home
        self.prepare()

    def resume(self, payload: Any) -> Any:
        """Hand ``payload`` over and return what comes back; a thread whose job is done goes home."""
        event = super().resume(payload)
        if type(event) is Done and not self.abandoned:
            self._at_home.append(self)
        return event

    @staticmethod
    def clock() -> float:
        """Tell the seconds that the process has computed."""
        return time.process_time()

    def _comes_back(self) -> bool:
        began = time.monotonic()
        while True:
            if super()._comes_back():
                return True
            if self.left_s <= _LEAST_S or time.monotonic() - began > _MOST_WALL * self.budget_s:
                return False

    def _run(self) -> None:
        while True:
            super()._run()


class WaitingThreads(Threads):
    """As many threads as there are: a confined process makes none.

    Args:
        budget_s: Seconds that one block may compute within one step.
        count: How many.
    """

    def __init__(self, budget_s: float, count: int) -> None:
        """Make them all."""
        super().__init__(budget_s)
        self._at_home: list[WaitingThread] = []
        self._at_home += [WaitingThread(budget_s, self._at_home) for _ in range(count)]

    def take(self) -> ThreadStack:
        """Return a thread without a job.

        Raises:
            SandboxedError: All wait in blocks.
        """
        if not self._at_home:
            raise SandboxedError.crowded()
        stack = self._at_home.pop()
        stack.left_s = stack.budget_s
        return stack


class WorkerValue(RemoteStageValue):
    """Stands for an object of the worker's that does not travel: what attention knows of all, for one."""

    def _refusal(self) -> Exception:
        return SandboxedError.value(self.name[1])

    def _place(self) -> str:
        return "outside of the sandbox"


class SandboxTraces(WorkerTraces):
    """The requests of one trace.

    Args:
        points: Of the stand-ins.
        limits: What blocks may use.
        new_model: Makes what ``model`` is in the blocks.

    Attributes:
        max_call_bytes: Of what a module is called with.
    """

    def __init__(
        self,
        points: ModelPoints,
        limits: EngineLimits,
        new_model: Callable[[SandboxTraces, Names], WorkerModel],
    ) -> None:
        """Start without requests."""
        self._make = new_model
        self.max_call_bytes = limits.sandbox_message_bytes
        self._side: SandboxSide | None = None
        self._wanted: list[str] = []
        self._before: list[str] = []
        self._passed: list[str] = []
        self._parcels: RowPayloads | None = None
        self._behind_parcels: RowPayloads | None = None
        self._is_behind = False
        super().__init__(points, None, limits)

    def _new_model(self, names: Names) -> WorkerModel:
        return self._make(self, names)

    def _policy(self, entry: TraceEntry) -> Policy | None:
        """Return what any block here may do: what the process forbids anyway, said at the block's line."""
        del entry
        return strangers_policy(self._limits) if self._limits.sandbox_compiles else TRUSTED

    def grow_up(
        self, num_blocks: int, rehearse: Callable[[SandboxTraces], None]
    ) -> Callable[[SandboxSide], None]:
        """Make what a forked process needs before it is confined; returns what it does then.

        Args:
            num_blocks: Blocks that may wait at once; each has a thread.
            rehearse: Runs a trace that leaves nothing behind.
        """
        self._threads = WaitingThreads(self._threads.budget_s, num_blocks)
        most = self._limits.sandbox_message_bytes
        self._closing = TraceEnd(self._threads, most, most)
        rehearse(self)
        return self.serve

    def serve(self, side: SandboxSide) -> None:
        """Do what the worker says, until the process is ended."""
        self._side = side
        while True:
            head, body = read_by_sandbox(side.receive())
            side.send(self.answer(head, body))

    def answer(self, head: ToSandbox, body: memoryview) -> list[bytes | memoryview]:
        """Do what the worker says, and return what to say to it."""
        match head:
            case Begin(arrived):
                self.begin(arrived, set())
                return packed(Go(self._now_wanted(), live=list(self._live)))
            case StepMessage(spans, finished, passed):
                self._pass(passed)
                self.begin((), set(finished))
                return self._step(spans)
            case Offer():
                return self._offer(head, body)
            case Broken(provider, passed, reason):
                self._pass(passed)
                self.board.fail(provider, SandboxedError.unshared(reason))
                return packed(self._go())
            case End(passed):
                self._pass(passed)
                return packed(self._leave_step())
            case Collect(key, results, index, finished):
                self.begin((), set(finished))
                pieces = self.collect(key, results, index)
                if index is None:
                    self._start_over()
                return packed(Collected(*self.telling.take_left(key)), pieces)
        raise TypeError(f"nothing is done on {type(head).__name__}")

    def _start_over(self) -> None:
        """The trace is over: another of the same tenant's may begin in this process, and finds it as new."""
        self.board.calls.clear()
        self.board.ever.clear()
        self._wanted, self._before, self._passed = [], [], []

    def _step(self, told: Sequence[tuple[str, int, int, bool]]) -> list[bytes | memoryview]:
        row, spans = 0, []
        for index, (request_id, num_rows, start, complete) in enumerate(told):
            spans.append(TraceSpan(request_id, index, row, num_rows, start, complete))
            row += num_rows
        self._is_behind = False
        self._before, self._passed = self._passed, []
        self._parcels = RowPayloads(spans, row)
        self._behind_parcels = RowPayloads(
            [TraceSpan(span.request_id, at, at, 1, 0, complete=True) for at, span in enumerate(spans)],
            len(spans),
        )
        self.step(spans, row)
        return packed(self._go())

    def _go(self, changes: Sequence[ValueSlot] = ()) -> Go:
        """Say to go on; if no block wants anything more, the step is over here and need not be ended."""
        if self.board.wanted:
            return Go(self._now_wanted(), changes=list(changes))
        return msgspec.structs.replace(self._leave_step(), changes=list(changes), is_over=True)

    def _leave_step(self) -> Go:
        """End the step, and say what came of it."""
        ended = self.end()
        told = [SandboxReply(name, parcel[1], parcel[2], parcel[3]) for name, parcel in self.news().items()]
        return Go(self._now_wanted(), ended=ended, told=told)

    def _pass(self, passed: Passed) -> None:
        """Take note of the places that the model has passed."""
        new = [*self._before[len(self._passed) : passed.same], *passed.more]
        self._passed += new
        self.board.calls.update(dict.fromkeys(new, 1))

    def _offer(self, head: Offer, body: memoryview) -> list[bytes | memoryview]:
        self._pass(head.passed)
        if head.is_behind and not self._is_behind:
            self._is_behind = True
            for request in self._active:
                request.after_model(len(self._active))
        parcels = self._behind_parcels if head.is_behind else self._parcels
        assert parcels is not None  # noqa: S101 - a step has begun
        slots: list[tuple[ValueSlot, memoryview]] = []
        try:
            value = _value(head, body)
            changes = parcels.changes(value, self.board.offer(head.provider, None, value))
            slots = [slot_of(rows, number) for number, rows in changes]
        except Exception as error:
            logger.debug("a value could not be shared", exc_info=True)
            self.board.fail(head.provider, error)
        return packed(self._go([slot for slot, _ in slots]), [content for _, content in slots])

    def _now_wanted(self) -> list[str] | None:
        wanted = list(self.board.wanted)
        if wanted == self._wanted:
            return None
        self._wanted = wanted
        return wanted

    # What blocks do with modules, see ``stages.elsewhere.Caller``.

    def call(self, stage: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a module of the worker's gives.

        Raises:
            SandboxedError: It is called with something that does not cross, or by code that is not the
                running block's own.
            BaseException: What the worker, or the module, raised.
        """
        del stage
        mediator = self.board.current
        if not isinstance(mediator, ThreadMediator):
            raise SandboxedError.call(path)
        args, kwargs = map_tensors((args, kwargs), plain)
        return mediator.on_models_thread(lambda: self._called(path, args, kwargs), path)

    def _called(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body: list[memoryview] = []
        most = self.max_call_bytes
        call = CallRequest(
            path,
            [_argument(path, one, body, most) for one in args],
            {name: _argument(path, one, body, most) for name, one in kwargs.items()},
        )
        if sum(map(len, body)) > most:  # the engine copies all of it before it can look at any
            raise SandboxedError.argument(path, f"more than the {most:,} bytes that a call may have")
        side = self._side
        assert side is not None  # noqa: S101 - a block runs
        side.send(packed(call, body))
        head, content = read_by_sandbox(side.receive())
        if not isinstance(head, Returned):
            raise SandboxedError.call(path)
        if head.error is not None:
            raise restore_error(head.error)
        with torch.inference_mode(mode=False):
            return decode(bytearray(content), resolve=WorkerValue)

    def lacking(self, stage: int, path: str, name: str) -> Exception:
        """Return the error for something that a module has in the worker alone."""
        del stage
        return SandboxedError.attribute(path, name)


def _value(head: Offer, body: memoryview) -> Any:
    if head.slots is None:
        return decode(bytearray(body), resolve=WorkerValue)
    found = list(map(Tensors(body).next, head.slots))
    return tuple(found) if head.is_tuple else found[0]


def _argument(path: str, value: Any, body: list[memoryview], max_bytes: int) -> Argument:
    if isinstance(value, torch.Tensor):
        try:
            slot, content = slot_of(value, max_bytes=max_bytes)
        except TypeError as error:
            raise SandboxedError.argument(path, str(error)) from None
        body.append(content)
        return slot
    if value is None or type(value) in {bool, int, float, str}:
        plain_value: Argument = value
        return plain_value
    raise SandboxedError.argument(path, f"a {type(value).__name__}")


__all__ = ["SandboxTraces", "WaitingThreads", "WorkerValue"]
