"""The time that a step of the engine waits for sandbox processes, with a budget per tenant.

Processes that are asked at the same place compute concurrently. Each tenant has one budget per step, however
many traces it has. A process that has not answered by then is left out of the step. One that cannot be left
out delays all requests, so its tenant *rests*: none of its sandboxed requests is scheduled for nine times as
long as the delay. The same holds for the worker's own work for a tenant's processes (copies of messages,
calls) beyond the budget.
"""

from __future__ import annotations

import math
import select
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_session import SandboxSession

_ALONE: Final = 8
"""Factor by which a step waits longer while, as far as is known, only one tenant has requests."""


_REST: Final = 9.0
"""Rest of a tenant as a multiple of the delay that its traces caused: they can delay a tenth of the time."""


class WaitBudget:
    """The wait budgets of one step; ``max_s`` is a tenant's for traces that cannot be left out of it."""

    def __init__(self, wait_s: float, max_s: float) -> None:
        """Take a tenant's budgets in a step: for all its traces, and for those that cannot be left out."""
        self._wait_s = wait_s
        self._max_s = max_s
        self._left_s = wait_s
        self._used_s: dict[str, float] = {}  # waited in this step, by tenant
        self._worked_s: dict[str, float] = {}  # the worker's own work in this step, by tenant
        self._is_single_tenant = False
        self._throttled_until: dict[str, float] = {}
        self.waited_s = 0.0

    def begin_step(self, *, is_single_tenant: bool = False) -> None:
        """Begin a step; the wait for a single tenant delays no other, so its budget is larger."""
        self._is_single_tenant = is_single_tenant
        self._left_s = min(self._wait_s * (_ALONE if is_single_tenant else 1), self._max_s)
        self._used_s.clear()
        self._worked_s.clear()
        self.waited_s = 0.0

    def end_step(self) -> float:
        """End a step; return the seconds it has waited.

        Tenants rest for which the worker has worked longer than their budget.
        """
        if not self._is_single_tenant:
            for tenant, worked_s in self._worked_s.items():
                if worked_s > self._left_s:
                    self._throttle(tenant, worked_s - self._left_s)
        waited_s, self.waited_s = self.waited_s, 0.0
        return waited_s

    def wait(self, sandboxes: Sequence[SandboxSession]) -> None:
        """Wait until all have answered or used their budgets; end late ones that cannot be left out."""
        self._wait([session for session in sandboxes if _is_awaited(session)], self._left_s)
        stubborn = [
            session for session in sandboxes if session.connection.is_pending and not session.can_be_deferred
        ]
        used_before = {session.tenant: self._used(session) for session in stubborn}
        worked_before = {session.tenant: self._worked(session) for session in stubborn}
        self._wait(stubborn, self._max_s)
        for session in stubborn:
            if session.connection.is_pending:
                session.connection.end_if_late(at_once=True)
        self._worked_s |= worked_before  # the rest of it counts as the delay
        if not self._is_single_tenant:
            for tenant, used_s in used_before.items():
                self._throttle(tenant, self._used_s.get(tenant, 0.0) - used_s)

    def _throttle(self, tenant: str, held_s: float) -> None:
        moment = time.monotonic()
        self._throttled_until[tenant] = max(self._throttled_until.get(tenant, 0.0), moment) + _REST * held_s

    @property
    def throttled(self) -> frozenset[str]:
        """The tenants whose traces have delayed others and that are resting for it."""
        moment = time.monotonic()
        self._throttled_until = {
            tenant: until for tenant, until in self._throttled_until.items() if until > moment
        }
        return frozenset(self._throttled_until)

    def wait_for_any(self, sandboxes: Sequence[SandboxSession], wait_s: float) -> None:
        """Wait, outside a step, for up to ``wait_s`` until one process has answered.

        Nothing is charged. A request may arrive, so no tenant's messages take longer than ``wait_s``.
        """
        self._worked_s.clear()
        pending = [session for session in sandboxes if session.connection.is_pending]
        end = time.monotonic() + wait_s
        left_s = wait_s
        while pending:
            self._pump(pending, left_s, math.inf, wait_s)
            left_s = end - time.monotonic()
            if left_s <= 0 or not all(session.connection.is_pending for session in pending):
                break
        self._worked_s.clear()
        _end_late(pending)

    def take_arrived(self, sandboxes: Sequence[SandboxSession]) -> None:
        """Process, at the beginning of a step, the messages that have arrived; charged to the budgets."""
        pending = [session for session in sandboxes if session.connection.is_pending]
        if pending:
            self._charge(pending, self._pump(pending, 0.0, self._left_s, self._left_s))
        _end_late(pending)

    def _wait(self, sandboxes: list[SandboxSession], max_s: float) -> None:
        """Wait until each session has an answer, or its tenant has used ``max_s`` seconds in this step."""
        while sandboxes:
            left_s = max(max_s - self._used(session) for session in sandboxes)
            self._charge(sandboxes, self._pump(sandboxes, max(left_s, 0.0), max_s, max_s))
            sandboxes = [
                session
                for session in sandboxes
                if session.connection.is_pending
                and self._used(session) < max_s
                and not session.connection.end_if_late()
            ]

    def _used(self, session: SandboxSession) -> float:
        return self._used_s.get(session.tenant, 0.0)

    def _worked(self, session: SandboxSession) -> float:
        return self._worked_s.get(session.tenant, 0.0)

    def _pump(
        self, sandboxes: Sequence[SandboxSession], wait_s: float, max_s: float, max_work_s: float
    ) -> float:
        """Read messages for up to ``wait_s``, and advance calls of modules; return the seconds it took.

        Calls of tenants that have used ``max_s`` in this step do not advance. Messages of tenants for which
        the worker has worked ``max_work_s`` are not read, since copying them takes time as well.
        """
        begin = time.monotonic()
        calling = [session for session in sandboxes if session.connection.is_calling]
        ready = _ready(
            [session for session in sandboxes if not session.connection.is_calling],
            0.0 if calling else wait_s,
        )
        for session in ready:
            if self._worked(session) < max_work_s:
                self._work(session, session.connection.pump)
        for session in calling:
            if self._used(session) + time.monotonic() - begin < max_s:
                self._work(session, session.connection.advance_call)
        took_s = time.monotonic() - begin
        for session in sandboxes:
            if session.connection.has_process:
                session.connection.waited_s += took_s / len(sandboxes)
        return took_s

    def _work(self, session: SandboxSession, act: Callable[[], None]) -> None:
        begin = time.monotonic()
        act()
        self._worked_s[session.tenant] = self._worked(session) + time.monotonic() - begin

    def _charge(self, sandboxes: Sequence[SandboxSession], took_s: float) -> None:
        self.waited_s += took_s
        for tenant in {session.tenant for session in sandboxes}:
            self._used_s[tenant] = self._used_s.get(tenant, 0.0) + took_s


def _is_awaited(session: SandboxSession) -> bool:
    """Return whether a step waits for an answer: not for a process to start if it can do without."""
    return session.connection.is_pending and (session.connection.has_process or not session.can_be_deferred)


def _end_late(sandboxes: Sequence[SandboxSession]) -> None:
    for session in sandboxes:
        if session.connection.is_pending:
            session.connection.end_if_late()


def _ready(sandboxes: Sequence[SandboxSession], wait_s: float) -> list[SandboxSession]:
    """Return the sessions with something to read, within ``wait_s``; several may share a descriptor."""
    by_descriptor: defaultdict[int, list[SandboxSession]] = defaultdict(list)
    for session in sandboxes:
        by_descriptor[session.connection.fileno()].append(session)
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    ready = poll.poll(wait_s * 1000)
    return [session for descriptor, _ in ready for session in by_descriptor[descriptor]]
