"""A worker's side of a sandboxed trace, real, whose process is played by a thread that follows a script."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nnsight_engine.sandbox.channel import EngineSide, Memory, SandboxSide
from nnsight_engine.sandbox.errors import SandboxEndedError, SandboxUnavailableError
from nnsight_engine.vllm_backend.traces.block_adapters import BlockAdapters
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.messages import Offer, packed
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.sandboxed import connection as connection_module
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    BeginRequests,
    ContinueReply,
    read_by_sandbox,
)
from nnsight_engine.vllm_backend.traces.sandboxed.module_calls import ModuleCall
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_session import Opened, SandboxSession
from nnsight_engine.vllm_backend.traces.sandboxed.wait_budget import WaitBudget
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

HALF_BYTES = 2**22
LAYER = "model.layers.0.output"
LATER = "model.layers.1.output"
POSITIONS = "model.layers.0.input"
SAMPLES = "model.samples.output"
NUM_TOKENS = 100
CALL_ROWS = 8
NUM_ROWS = 5
NUM_OWN = 3
BUDGET_S = 0.3
TRACE_S = 4 * BUDGET_S
SHORT_S = 0.01
"""How long a step waits where it is to go on without a process."""

OWN = TraceSpan("own", 0, 0, NUM_OWN, 0, complete=True)
"""The request's rows in a step."""

Message = list[bytes | memoryview]
Script = Callable[[SandboxSide], None]


class PlayedProcess:
    """What the worker knows of a process."""

    process = 1

    def __init__(self, side: EngineSide, *, never_rests: bool) -> None:
        self.side = side
        self.is_ended = False
        self.used_s = 0.0
        self.never_rests = never_rests

    def cpu_s(self) -> float:
        # The time that a script has it use, however busy the machine is.
        return time.monotonic() if self.never_rests else self.used_s

    def end(self) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.side.close()


class PlayedSource:
    """Provides the process, at once or once it is let."""

    def __init__(self, process: PlayedProcess, *, is_ready: bool) -> None:
        self._process = process
        self._ready = os.eventfd(int(is_ready), os.EFD_NONBLOCK)

    def take_process(self) -> PlayedProcess | None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
            return self._process
        return None

    def let(self) -> None:
        os.eventfd_write(self._ready, 1)

    def fileno(self) -> int:
        return self._ready

    def error(self) -> SandboxUnavailableError:
        return SandboxUnavailableError("none was ready")

    def close(self) -> None:
        os.close(self._ready)


@dataclass
class PlayedModules:
    """Calls modules, slowly: each counts as ``lasts_s``, however busy the machine is."""

    num_calls: int = 0
    counted_s: float = 0.0
    lasts_s: float = 0.0
    call_bytes: int = 1000
    places: frozenset[str] = frozenset({LAYER, LATER, POSITIONS, SAMPLES})
    adapters: BlockAdapters = field(default_factory=BlockAdapters)

    def begin_call(self, path: str, args: Sequence[Any], kwargs: dict[str, Any]) -> ModuleCall:
        del args, kwargs
        return ModuleCall(path, self._called, [torch.zeros(CALL_ROWS, 2)], 1, 1)

    def _called(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        time.sleep(self.lasts_s)
        self.counted_s += self.lasts_s
        return rows + self.num_calls


@dataclass
class World:
    """A worker with one sandboxed request, three rows of the step's five."""

    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    served: PlayedModules = field(default_factory=PlayedModules)
    dispatcher: TraceDispatcher = field(default_factory=TraceDispatcher)
    session: SandboxSession = field(init=False)
    process: PlayedProcess = field(init=False)
    source: PlayedSource = field(init=False)
    waiting: WaitBudget = field(default_factory=lambda: WaitBudget(BUDGET_S, 5 * BUDGET_S))

    def __post_init__(self) -> None:
        patch = self.closing.enter_context(pytest.MonkeyPatch.context())
        calls = SimpleNamespace(monotonic=lambda: self.served.counted_s, thread_time=time.thread_time)
        patch.setattr(connection_module, "time", calls)

    def begin(
        self,
        script: Script,
        *,
        never_rests: bool = False,
        is_ready: bool = True,
        tenant: str = "acme",
        side: type[EngineSide] = EngineSide,
    ) -> None:
        own, theirs = socket.socketpair()
        self.closing.callback(own.close)
        shared = Memory.create(HALF_BYTES)
        self.process = PlayedProcess(side(own, Memory(shared, HALF_BYTES)), never_rests=never_rests)
        descriptor = theirs.detach()  # the thread's, which closes it
        inside = SandboxSide(descriptor, Memory(shared, HALF_BYTES))
        os.close(shared)
        self.dispatcher.place.tokens = {SAMPLES: NUM_TOKENS}
        opened = Opened(cast("Any", None), cast("Any", self.served), HALF_BYTES)
        self.source = PlayedSource(self.process, is_ready=is_ready)
        self.closing.callback(self.source.close)
        self.session = SandboxSession(
            self.dispatcher, cast("Any", self.source), opened, 1, tenant, BUDGET_S, TRACE_S
        )
        threading.Thread(target=_played, args=(script, inside, descriptor), daemon=True).start()

    def arrive(self, name: str = "own", number: int = 0, count: int = 1) -> None:
        """Have a request arrive, one of a trace's."""
        entry = TraceEntry("key", number, 1, b"", [{}] * count, sandbox_of=None)
        self.session.send_requests([(name, entry)])

    def step(self) -> None:
        self.session.send_requests(
            [("own", TraceEntry("key", 0, 1, b"", [{}], streams=True, prints=True, sandbox_of=None))]
        )
        self.go([OWN])

    def go(
        self, spans: Sequence[TraceSpan], *, is_bound: bool = True, is_single_tenant: bool = False
    ) -> None:
        """Begin a step as the worker does."""
        self.dispatcher.begin_step()
        self.waiting.begin_step(is_single_tenant=is_single_tenant)
        self.session.prepare(spans, is_bound=is_bound)
        self.waiting.wait([self.session])
        self.session.step(spans, NUM_ROWS)
        self.gather()
        self.dispatcher.gather = self.gather

    def gather(self) -> None:
        self.waiting.wait([self.session])
        self.session.defer()

    def listen(self) -> None:
        """Wait between steps until the process has answered."""
        while self.session.connection.is_pending:
            self.waiting.wait_for_any([self.session], 10)

    def end(self) -> tuple[list[str], dict[str, Any]]:
        self.session.finish()
        self.waiting.wait([self.session])
        self.session.end_step()
        self.waiting.end_step()
        return self.session.take_deltas()

    def has_collected(self) -> bool:
        """Ask for what was saved, and return whether it has come."""
        self.session.request_saved("key", {})
        self.waiting.wait_for_any([self.session], 0.05)
        return self.session.has_collected

    def error(self) -> str:
        assert self.process.is_ended
        assert isinstance(self.session.error, SandboxEndedError)
        assert self.end() == (["own"], {})
        return str(self.session.error)


def _played(script: Script, inside: SandboxSide, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the worker has ended it
        script(inside)
    os.close(descriptor)


WANTING: Message = packed(ContinueReply([LAYER], live=["own"]))
"""The first reply of a process that is offered a value."""


def replying(*replies: Message) -> Script:
    """Reply to each message with the next one."""

    def reply(side: SandboxSide) -> None:
        for one in replies:
            side.receive()
            side.send(one)

    return reply


def wanting(*places: str, then: Callable[[Any], Message]) -> Script:
    """Answer honestly until a value is offered."""

    def lie(side: SandboxSide) -> None:
        while True:
            head, _ = read_by_sandbox(side.receive())
            if isinstance(head, BeginRequests):
                side.send(packed(ContinueReply(list(places), live=["own"])))
            elif isinstance(head, Offer):
                side.send(then(head))
            else:
                side.send(packed(ContinueReply()))

    return lie
