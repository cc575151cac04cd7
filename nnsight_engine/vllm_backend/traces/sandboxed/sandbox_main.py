"""The sandbox process's side of sandboxed traces: runs blocks on stand-ins for the model's modules.

``SandboxTraces`` is the counterpart of ``WorkerTraces``: the worker offers it values and calls modules for
it, as pipeline stages do (see ``stages``). The process has no weights, and only the rows of this trace's
requests.

A process in which a trace has left something behind (another default dtype, a replaced function of torch) is
not used again. A hostile block can deceive this, and then disturbs its own tenant only, as a process is never
given to another one.
"""

from __future__ import annotations

import logging
import operator
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.interleaving.call_stacks import Done
from nnsight_engine.interleaving.threads import ThreadMediator, Threads, ThreadStack
from nnsight_engine.sandbox.block_checker import CHECKED, MODULES
from nnsight_engine.sandbox.channel import SandboxSide
from nnsight_engine.serialization import decode, restore_error
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.traces.errors import SandboxedError, SpreadModuleError
from nnsight_engine.vllm_backend.traces.messages import (
    CallResult,
    End,
    InvalidValue,
    Offer,
    PassedPlaces,
    StepFacts,
    ValueSlot,
    packed,
    slot_of,
    unpacked_value,
)
from nnsight_engine.vllm_backend.traces.model import Names, WorkerModel
from nnsight_engine.vllm_backend.traces.remote_modules import RemoteModuleEnvoy
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.row_payloads import RemoteValue, RowPayloads
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    Argument,
    BeginRequests,
    CallRequest,
    Collect,
    Collected,
    ContinueReply,
    SandboxReply,
    StepMessage,
    ToSandbox,
    read_by_sandbox,
)
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher
from nnsight_engine.vllm_backend.traces.trace_store import TraceEnd
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

_CLASSES: Final = (torch.Tensor, torch.nn.Module)


class Leftovers:
    """Compares the state that blocks can reach with what it was when this object was made."""

    def __init__(self) -> None:
        self._names = [name for name in ("builtins", *MODULES) if name in sys.modules]
        self._before = [dict(namespace) for namespace in self._namespaces()]
        self._settings = _torch_settings()

    def exist(self) -> bool:
        """Return whether settings, or names in modules that blocks can use, are not as before."""
        if self._settings != _torch_settings():
            return True
        pairs = zip(self._before, self._namespaces(), strict=True)
        return not all(
            len(before) == len(after) and all(map(operator.is_, before.values(), after.values()))
            for before, after in pairs
        )

    def _namespaces(self) -> list[Any]:
        return [vars(owner) for owner in (*(sys.modules[name] for name in self._names), *_CLASSES)]

    @staticmethod
    def draw_anew() -> None:
        """Seed the generators that traces share; torch's is seeded for each block."""
        random.seed()
        np.random.seed()  # the state of old code, which has no generator of its own


def thread_settings() -> tuple[Any, ...]:
    """Return the settings that torch and numpy have for the calling thread only."""
    return (
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_function_stack(),  # noqa: SLF001 - there is no public way to count them
        len(_get_current_dispatch_mode_stack()),
        np.geterr(),
        sys.gettrace(),
        sys.getprofile(),
    )


def _torch_settings() -> tuple[Any, ...]:
    """Return the settings of the whole process that a block can change."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        vars(torch._tensor_str.PRINT_OPTS).copy(),  # noqa: SLF001 - there is no public way to read them
        sys.getrecursionlimit(),
        list(warnings.filters),
    )


logger = logging.getLogger(__name__)

_MIN_S: Final = 0.001
"""Remaining job time, in seconds, below which waiting further is not worthwhile."""
_MAX_WALL_RATIO: Final = 28
"""Limit for a job's wall-clock time as a multiple of its CPU budget.

The machine may be busy, or the job asleep.
"""


class WaitingThread(ThreadStack):
    """A thread that was started before the process was confined, and runs one job after the other.

    Its clock is the process's CPU time: on a busy machine a job is not late because other processes compute.
    """

    __slots__ = ("_idle_threads", "_settings", "has_leftovers")

    grace_s = -1
    """A job in a long call of C code is not abandoned, which takes a thread: the worker ends the process."""

    def __init__(self, budget_s: float, idle_threads: list[WaitingThread]) -> None:
        """Start the thread, which adds itself to ``idle_threads`` after each job."""
        super().__init__(budget_s)
        self._idle_threads = idle_threads
        self._settings: tuple[Any, ...] | None = None
        self.has_leftovers = False
        self.prepare()

    def start(self, job: Callable[[], Any]) -> Any:
        return super().start(partial(self._watched, job))

    def _watched(self, job: Callable[[], Any]) -> Any:
        """Run a job on this thread; note whether it leaves other settings than the first job found."""
        if self._settings is None:
            self._settings = thread_settings()
        try:
            return job()
        finally:
            self.has_leftovers = thread_settings() != self._settings

    def resume(self, payload: Any) -> Any:
        """Let the job continue; return its next event. After its end the thread takes another job."""
        event = super().resume(payload)
        if type(event) is Done and not self.abandoned:
            self._idle_threads.append(self)
        return event

    @staticmethod
    def clock() -> float:
        return time.process_time()

    def _wait_for_control(self) -> bool:
        """Wait until the job hands over; False if its CPU time, or far more wall time, has passed."""
        began = time.monotonic()
        while True:
            if super()._wait_for_control():
                return True
            if self.left_s <= _MIN_S or time.monotonic() - began > _MAX_WALL_RATIO * self.budget_s:
                return False

    def _run(self) -> None:
        while True:
            super()._run()


class WaitingThreads(Threads):
    """A fixed pool of threads: a confined process cannot start any. ``budget_s`` is per block and step."""

    def __init__(self, budget_s: float, count: int) -> None:
        super().__init__(budget_s)
        self._idle_threads: list[WaitingThread] = []
        self._all_threads = [WaitingThread(budget_s, self._idle_threads) for _ in range(count)]
        self._idle_threads += self._all_threads

    @property
    def have_leftovers(self) -> bool:
        return any(thread.has_leftovers for thread in self._all_threads)

    def take_stack(self) -> ThreadStack:
        """Take an idle thread, with a new budget; SandboxedError if all are in use."""
        if not self._idle_threads:
            raise SandboxedError.crowded()
        stack = self._idle_threads.pop()
        stack.left_s = stack.budget_s
        return stack


_worker_value = partial(RemoteValue, place="outside of the sandbox", refusal=SandboxedError.value)
"""A placeholder for an object of the worker that is not sent, such as attention metadata."""


class SandboxDispatcher(TraceDispatcher):
    """The dispatcher of a sandbox process, which has the worker call modules over ``side``.

    The sharding of ``refused`` places over ranks is not known. ``max_call_bytes`` limits a call's arguments.
    ``side`` exists once the process has been forked and serves its trace.
    """

    def __init__(self, entry: str, refused: frozenset[str], max_call_bytes: int) -> None:
        super().__init__()
        self.entry = entry
        self.refused = refused
        self.max_call_bytes = max_call_bytes
        self.side: SandboxSide | None = None

    def refusal(self, provider: str) -> Exception | None:
        return SpreadModuleError.unknown_layout(provider) if provider in self.refused else None

    def call_elsewhere(self, stage: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have the worker call a module; SandboxedError for code other than the running block's own."""
        del stage
        mediator = self.current
        if not isinstance(mediator, ThreadMediator):
            raise SandboxedError.call(path)
        args, kwargs = map_tensors((args, kwargs), plain)
        return mediator.on_models_thread(lambda: self._called(path, args, kwargs), path)

    def _called(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send the worker a request to call a module, and return its result or raise its error."""
        body: list[memoryview] = []
        max_bytes = self.max_call_bytes
        call = CallRequest(
            path,
            [_argument(path, arg, body, max_bytes) for arg in args],
            {name: _argument(path, arg, body, max_bytes) for name, arg in kwargs.items()},
        )
        if sum(map(len, body)) > max_bytes:  # the engine copies all of it before it can validate any
            raise SandboxedError.argument(path, f"more than the {max_bytes:,} bytes that a call may have")
        assert self.side is not None  # noqa: S101 - the block runs in the forked process
        self.side.send(packed(call, body))
        head, content = read_by_sandbox(self.side.receive())
        if not isinstance(head, CallResult):
            raise SandboxedError.call(path)
        if head.error is not None:
            raise restore_error(head.error)
        with torch.inference_mode(mode=False):
            return decode(bytearray(content), resolve=_worker_value)


def _argument(path: str, value: Any, body: list[memoryview], max_bytes: int) -> Argument:
    """Return an argument as a message has it; the bytes of a tensor are appended to ``body``."""
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


class SandboxEnvoy(RemoteModuleEnvoy):
    @property
    def source(self) -> Any:
        """Raise: operations inside a forward run in the worker, and their values are not a request's rows."""
        raise SandboxedError.source(str(self.path))


class SandboxTraces(WorkerTraces):
    """The requests of one trace, in its process."""

    policy = CHECKED
    dispatcher: SandboxDispatcher
    _block_threads: WaitingThreads

    def __init__(self, points: ModelPoints, limits: EngineLimits, dispatcher: SandboxDispatcher) -> None:
        self._wanted: list[str] = []
        self._before: list[str] = []  # places that the model passed in the step before
        self._passed: list[str] = []  # in this step
        self._payloads: RowPayloads | None = None
        self._after_model_payloads: RowPayloads | None = None
        self._is_after_model = False
        self._leftovers = Leftovers()
        super().__init__(points, None, limits, dispatcher=dispatcher)

    def _new_model(self, names: Names) -> WorkerModel:
        return WorkerModel(self._points, None, self.dispatcher, names=names, calls=SandboxEnvoy)

    def prepare_child(
        self, num_blocks: int, warm_up: Callable[[SandboxTraces], None]
    ) -> Callable[[SandboxSide], None]:
        """Prepare a process before it is confined, and return the function to run. A block needs a thread."""
        self._leftovers.draw_anew()
        self._threads = self._block_threads = WaitingThreads(self._threads.budget_s, num_blocks)
        max_bytes = self._limits.sandbox_message_bytes
        self.store.threads, self.store.closing = self._threads, TraceEnd(self._threads, max_bytes, max_bytes)
        warm_up(self)
        self._leftovers = Leftovers()
        return self.serve

    def serve(self, side: SandboxSide) -> None:
        """Answer the worker's messages, one trace after the other, until the process is ended."""
        self.dispatcher.side = side
        while True:
            head, body = read_by_sandbox(side.receive())
            side.send(self.answer(head, body))
            if isinstance(head, Collect):
                self._leftovers.draw_anew()

    def answer(self, head: ToSandbox, body: memoryview) -> list[bytes | memoryview]:
        """Do what a message of the worker asks, and return the message that answers it."""
        match head:
            case BeginRequests(arrived):
                self.begin_step(StepFacts(arrived))
                return packed(ContinueReply(self._now_wanted(), live=list(self._live)))
            case StepMessage(spans, finished, passed):
                self._pass(passed)
                self.begin_step(StepFacts(finished=finished))
                return self._enter_step(spans)
            case Offer():
                return self._offer(head, body)
            case InvalidValue(provider, passed, error):
                self._pass(passed)
                self.dispatcher.fail(provider, restore_error(error))
                return packed(self._continue())
            case End(passed):
                self._pass(passed)
                return packed(self._leave_step())
            case Collect(key, results, finished):
                self.begin_step(StepFacts(finished=finished))
                ended = self.collect(key, results)
                self._start_over()
                is_clean = not (self._leftovers.exist() or self._block_threads.have_leftovers)
                return packed(Collected(ended.printed, ended.failure, is_clean), ended.pieces)
        raise TypeError(f"nothing is done on {type(head).__name__}")

    def _start_over(self) -> None:
        self.dispatcher.calls.clear()
        self.dispatcher.ever.clear()
        self._wanted, self._before, self._passed = [], [], []

    def _enter_step(self, span_data: Sequence[tuple[str, int, int, bool]]) -> list[bytes | memoryview]:
        """Begin a step; the process has its own requests' rows only, in the order of the spans."""
        row, spans = 0, []
        for index, (request_id, num_rows, start, complete) in enumerate(span_data):
            spans.append(TraceSpan(request_id, index, row, num_rows, start, complete))
            row += num_rows
        self._is_after_model = False
        self._before, self._passed = self._passed, []
        self._payloads = RowPayloads(spans, row)
        self._after_model_payloads = RowPayloads(
            [TraceSpan(span.request_id, at, at, 1, 0, complete=True) for at, span in enumerate(spans)],
            len(spans),
        )
        self.step(spans, row)
        return packed(self._continue())

    def _continue(self, changes: Sequence[ValueSlot] = ()) -> ContinueReply:
        """Return the message to continue; if no block wants anything more, it ends the step at once."""
        if self.dispatcher.wanted:
            return ContinueReply(self._now_wanted(), changes=list(changes))
        return msgspec.structs.replace(self._leave_step(), changes=list(changes), is_over=True)

    def _leave_step(self) -> ContinueReply:
        """End the step; return the message with the requests that are to end, and reports for clients."""
        ended = self.end_step()
        reports = [
            SandboxReply(name, index, delta, printed)
            for name, (_, index, delta, printed) in self.reports().items()
        ]
        return ContinueReply(self._now_wanted(), ended=ended, reports=reports)

    def _pass(self, passed: PassedPlaces) -> None:
        new = [*self._before[len(self._passed) : passed.same], *passed.more]
        self._passed += new
        self.dispatcher.calls.update(dict.fromkeys(new, 1))

    def _offer(self, head: Offer, body: memoryview) -> list[bytes | memoryview]:
        """Offer the blocks a value of the model; return the message with the rows that they changed."""
        self._pass(head.passed)
        if head.is_after_model and not self._is_after_model:
            self._is_after_model = True
            for request in self._active:
                request.after_model(len(self._active))
        payloads = self._after_model_payloads if head.is_after_model else self._payloads
        assert payloads is not None  # noqa: S101 - a step has begun
        slots: list[tuple[ValueSlot, memoryview]] = []
        try:
            value = unpacked_value(head, body, _worker_value)
            changes = payloads.changes(value, self.dispatcher.offer(head.provider, None, value))
            slots = [slot_of(rows, number) for number, rows in changes]
        except Exception as error:
            logger.debug("a value could not be shared", exc_info=True)
            self.dispatcher.fail(head.provider, error)
        return packed(self._continue([slot for slot, _ in slots]), [content for _, content in slots])

    def _now_wanted(self) -> list[str] | None:
        """Return the places whose values blocks want; None if they are as in the last message."""
        wanted = list(self.dispatcher.wanted)
        if wanted == self._wanted:
            return None
        self._wanted = wanted
        return wanted
