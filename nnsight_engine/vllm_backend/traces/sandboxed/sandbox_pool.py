"""A worker's sandbox processes: the setup of their fork server, and the process that a trace gets.

A trace gets an idle process of its tenant, stopped since its last trace, or a new one; nothing here waits.
Reuse is faster, and state that a block may have left in a process can only reach blocks of its own tenant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from nnsight_engine.core.work_context import SANDBOX_EVENTS
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.sandbox.forkserver import ForkServer, Sandbox
from nnsight_engine.serialization import encode
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.messages import StepFacts
from nnsight_engine.vllm_backend.traces.reporting import Report
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_session import Opened, SandboxSession
from nnsight_engine.vllm_backend.traces.sandboxed.wait_budget import WaitBudget
from nnsight_engine.vllm_backend.traces.trace_store import EndedTrace

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.traces.remote_modules import Description
    from nnsight_engine.vllm_backend.traces.request import TraceSpan
    from nnsight_engine.vllm_backend.traces.sandboxed.module_calls import CallableModules
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

_MAX_PARKED: Final = 8
_MAX_USES: Final = 64
_MAX_GROWN_BYTES: Final = 128 * 2**20
_MAX_CPU_SHARE: Final = 0.1
"""Maximum share of a process's lifetime CPU seconds that may be used when it is parked for another trace."""


class IdleProcesses:
    """The idle processes of all tenants; ``cpu_s`` limits the CPU seconds of a process's life."""

    def __init__(self, cpu_s: float) -> None:
        self._max_cpu_s = _MAX_CPU_SHARE * cpu_s
        self._by_process: OrderedDict[int, tuple[str, Sandbox]] = OrderedDict()

    def park(self, tenant: str, sandbox: Sandbox) -> None:
        """Park a process whose trace has ended, or end it if it is too large or has been used too much."""
        sandbox.num_uses += 1
        try:
            sandbox.pause()
            sandbox.side.forget()  # the memory of messages is shared, and counts as the process's too
            is_reusable = (
                sandbox.num_uses < _MAX_USES
                and sandbox.grown_bytes() <= _MAX_GROWN_BYTES
                and sandbox.cpu_s() <= self._max_cpu_s
            )
        except OSError:
            is_reusable = False  # it has died
        if not is_reusable:
            sandbox.end()
            return
        self._by_process[sandbox.process] = (tenant, sandbox)
        while len(self._by_process) > _MAX_PARKED:
            self._by_process.popitem(last=False)[1][1].end()

    def take_process(self, tenant: str) -> Sandbox | None:
        """Return the tenant's process that was parked last and is still usable, resumed; None without one."""
        of_tenant = [process for process, (owner, _) in self._by_process.items() if owner == tenant]
        for process in reversed(of_tenant):
            _, sandbox = self._by_process.pop(process)
            with contextlib.suppress(OSError):
                if sandbox.side.has_nothing_unread():
                    sandbox.resume()
                    return sandbox
            sandbox.end()  # it has died, or sent an unsolicited message
        return None


class ProcessSource:
    """Where a trace gets its process: a parked one of its tenant, or a new one of the fork server."""

    def __init__(
        self, tenant: str, idle: IdleProcesses, server: ForkServer, on_take: Callable[[], None]
    ) -> None:
        self._tenant = tenant
        self._idle = idle
        self._server = server
        self._on_take = on_take

    def take_process(self) -> Sandbox | None:
        sandbox = self._idle.take_process(self._tenant) or self._server.take_process()
        if sandbox is not None:
            self._on_take()
        return sandbox

    def fileno(self) -> int:
        return self._server.fileno()

    def error(self) -> SandboxUnavailableError:
        return self._server.error or SandboxUnavailableError(
            "no sandbox was ready in time: send the request again"
        )


_ZYGOTE: Final = "nnsight_engine.vllm_backend.traces.sandboxed.worker_zygote"
_NUM_SPARE: Final = 4


def open_sandbox_pool(
    sandboxes: SandboxPool,
    served: CallableModules,
    modules: Sequence[Description],
    points: ModelPoints,
    limits: EngineLimits,
) -> None:
    """Start the fork server for a worker's sandboxed traces, without waiting for it."""
    message_bytes = limits.sandbox_message_bytes
    setup = {
        "call_bytes": served.call_bytes,
        "modules": list(modules),
        "layout": points.layout.to_plain(),
        "sizes": {
            "hidden_size": points.hidden_size,
            "vocab_size": points.vocab_size,
            "tensor_parallel_size": points.tensor_parallel_size,
        },
        "limits": dataclasses.asdict(limits),
        "entry": served.entry,
        "refused": sorted(served.refused),
    }
    command = [sys.executable, "-m", _ZYGOTE]
    server = ForkServer(
        command, encode(setup), message_bytes, _NUM_SPARE, needs_namespaces=limits.sandbox_needs_namespaces
    )
    server.start()
    sandboxes.open(server, served, message_bytes)


class SandboxPool:
    """All sandboxed traces of a worker; ``counts`` are by ``SANDBOX_EVENTS``.

    ``facts`` are those of the running step.
    """

    def __init__(self, dispatcher: TraceDispatcher, limits: EngineLimits) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self._open: Opened | None = None
        self._by_key: dict[str, SandboxSession] = {}
        self._by_request: dict[str, SandboxSession] = {}
        self._active: list[SandboxSession] = []
        self._parked = IdleProcesses(limits.sandbox_cpu_s)
        self.counts = dict.fromkeys(SANDBOX_EVENTS, 0)
        self.facts = StepFacts()
        self._waiting = WaitBudget(limits.sandbox_wait_s, limits.sandbox_step_s)

    def open(self, server: ForkServer, served: CallableModules, max_bytes: int) -> None:
        """Enable the pool; no process is available before. ``max_bytes`` limits the size of an answer."""
        self._open = Opened(server, served, max_bytes)

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def is_ready(self) -> bool:
        """Whether a spare process is available; SandboxUnavailableError if processes cannot be started."""
        return self._open is not None and self._open.server.is_ready

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def idle(self) -> bool:
        return all(session.is_idle for session in self._by_key.values())

    def arrive(self, request_id: str, entry: TraceEntry, order: int, tenant: str) -> None:
        """Start a request's blocks once a process is ready; SandboxUnavailableError if too many run."""
        session = self._by_key.get(entry.key)
        if session is None:
            try:
                session = self._by_key[entry.key] = self._opened(tenant, order)
            except SandboxUnavailableError:
                self.counts["refused"] += 1
                raise
        self._by_request[request_id] = session
        session.send_requests([(request_id, msgspec.structs.replace(entry, sandbox_of=None))])

    def _opened(self, tenant: str, order: int) -> SandboxSession:
        """Return a new trace's session; SandboxUnavailableError if as many are open as may be."""
        if len(self._by_key) >= self._limits.max_sandboxes:
            raise SandboxUnavailableError(
                f"{len(self._by_key)} sandboxes are at work, as many as may be: send the request again"
            )
        if self._open is None:
            raise SandboxUnavailableError("no sandbox has been started: send the request again")
        source = ProcessSource(tenant, self._parked, self._open.server, self._count_start)
        step_s, trace_s = self._limits.sandbox_step_s, self._limits.sandbox_cpu_s
        return SandboxSession(self._dispatcher, source, self._open, order, tenant, step_s, trace_s)

    def _count_start(self) -> None:
        self.counts["started"] += 1

    def begin_step(self) -> None:
        """Begin a step: note the requests that have ended, and read the messages that have arrived."""
        self._waiting.begin_step(is_single_tenant=self.facts.is_single_tenant)
        for session in self._by_key.values():
            ended = session.live.intersection(self.facts.finished)
            session.live -= ended
            session.finished |= ended
        self._waiting.take_arrived(list(self._by_key.values()))

    def wait_for_any(self, wait_s: float) -> None:
        if self.throttled and not self.waiting:
            time.sleep(wait_s)  # the rest ends without an answer
        self._waiting.wait_for_any(list(self._by_key.values()), wait_s)

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset().union(*(session.waiting for session in self._by_key.values()))

    @property
    def throttled(self) -> frozenset[str]:
        """The tenants whose requests are not to be scheduled now, having delayed others; none if alone."""
        return frozenset() if self.facts.is_single_tenant else self._waiting.throttled

    def has(self, request_id: str) -> bool:
        """Return whether a request is sandboxed, and its block still takes part in steps."""
        session = self._by_request.get(request_id)
        return session is not None and request_id in session.live

    def knows(self, key: str) -> bool:
        return key in self._by_key

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> None:
        """Begin the sandboxed requests' part of a step, and wait for processes; late ones are left out."""
        by_session: dict[SandboxSession, list[TraceSpan]] = {}
        for span in spans:
            by_session.setdefault(self._by_request[span.request_id], []).append(span)
        self._active = list(by_session)
        for session, session_spans in by_session.items():
            once_begun = self.facts.bound_once_begun if session.connection.has_process else ()
            unrepeatable = {*self.facts.bound, *once_begun}
            session.prepare(
                session_spans, is_bound=any(span.request_id in unrepeatable for span in session_spans)
            )
        self._waiting.wait(self._active)
        for session, session_spans in by_session.items():
            session.step(session_spans, num_rows)
        self.gather()
        self._dispatcher.gather = self.gather

    def gather(self) -> None:
        """Wait for the processes that were asked; a process that takes too long is left out of the step."""
        self._waiting.wait(self._active)
        for session in self._active:
            session.defer()
        self._dispatcher.undone = [request_id for session in self._active for request_id in session.undone]

    @property
    def active(self) -> list[SandboxSession]:
        return self._active

    def again(self) -> None:
        for session in self._active:
            session.again()

    def after_model(self, num_requests: int) -> None:
        for session in self._active:
            session.after_model(num_requests)

    def end_step(self) -> tuple[list[str], dict[str, Report], float]:
        """End the step; return the requests that are to end, the reports by request, and the wait in s."""
        self._dispatcher.gather = None
        for session in self._active:
            session.finish()
        self._waiting.wait([session for session in self._active if not session.is_deferred])
        for session in self._active:
            session.end_step()
        waited_s = self._waiting.end_step()
        self._active = []
        ended: list[str] = []
        reports: dict[str, Report] = {}
        for session in self._by_key.values():
            over, new_reports = session.take_deltas()
            ended += over
            reports |= new_reports
        return ended, reports, waited_s

    def has_collected(self, key: str, results: Mapping[str, Any], wait_s: float) -> bool:
        """Request a trace's saved values, and wait for up to ``wait_s``; return whether they have arrived."""
        session = self._by_key[key]
        session.stop_waiting()
        end = time.monotonic() + wait_s
        while not session.has_collected:
            session.request_saved(key, results)
            left_s = end - time.monotonic()
            if left_s <= 0:
                break
            self._waiting.wait_for_any([session], left_s)
        return session.has_collected

    def collect(self, key: str) -> EndedTrace:
        """End a trace; RuntimeError if its values have not arrived: the engine must not wait for them."""
        session = self._by_key[key]
        if not session.has_collected:
            raise RuntimeError("a sandboxed trace has not been collected yet: poll `finish_trace`")
        pieces, remaining = session.saved()
        connection = session.connection
        ended = EndedTrace(
            pieces, connection.take_spent(), *remaining, session.tier, has_begun=connection.has_process
        )
        self._forget(key)
        return ended

    def drop(self, key: str) -> float:
        """Drop a trace; return the seconds that the engine has waited for it, 0 if it is unknown."""
        session = self._by_key.get(key)
        if session is None:
            return 0.0
        spent_s = session.connection.take_spent()
        self._forget(key)
        return spent_s

    def _forget(self, key: str) -> None:
        """Remove an ended trace; count it if its process was ended early, and park the process otherwise."""
        session = self._by_key.pop(key)
        for request_id in session.entries:
            self._by_request.pop(request_id, None)
        if session.error is not None:
            self.counts["killed" if session.connection.has_process else "refused"] += 1
        sandbox = session.close()
        if sandbox is not None:
            self._parked.park(session.tenant, sandbox)
            self._start_waiting(session.tenant)

    def _start_waiting(self, tenant: str) -> None:
        """Have one trace of the tenant that waits for a process take the parked one."""
        for session in self._by_key.values():
            if session.tenant == tenant and not session.connection.has_process:
                session.connection.pump()
                return
