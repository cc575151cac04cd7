"""Pending calls of ``tracer.local()``: parts of blocks that the job's client runs, over its WebSocket.

A job has at most one at a time. Every client that offers to answer receives it, also one that connects later;
the first answer counts. Call numbers are never reused, so that a late answer cannot match another call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Iterator

from nnsight_engine.remote_backend.frames import Frame, calling

Bytes = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class _PendingCall:
    number: int
    frame: Frame
    answer: asyncio.Future[Bytes]


class LocalCalls:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._pending: dict[str, _PendingCall] = {}
        self._listeners: dict[str, set[asyncio.Event]] = {}

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    async def call(self, job_id: str, data: Bytes) -> Bytes:
        """Send a call to a job's client, and return its answer; raises TimeoutError."""
        number = next(self._numbers)
        call = _PendingCall(number, calling(number, data), asyncio.get_running_loop().create_future())
        self._pending[job_id] = call
        for listener in self._listeners.get(job_id, ()):
            listener.set()
        try:
            return await asyncio.wait_for(call.answer, self._timeout_s)
        finally:
            if self._pending.get(job_id) is call:
                del self._pending[job_id]

    async def frames(self, job_id: str) -> AsyncGenerator[Frame, None]:
        """Yield the calls to a job's client; never ends."""
        last = 0
        with self._listening(job_id) as changed:
            while True:
                changed.clear()
                call = self._pending.get(job_id)
                if call is not None and call.number != last:
                    last = call.number
                    yield call.frame
                else:
                    await changed.wait()

    def is_waiting(self, job_id: str, number: int) -> bool:
        call = self._pending.get(job_id)
        return call is not None and call.number == number and not call.answer.done()

    def answer(self, job_id: str, number: int, data: Bytes) -> None:
        """Deliver a client's answer; discarded if its call is no longer pending."""
        if self.is_waiting(job_id, number):
            self._pending[job_id].answer.set_result(data)

    @contextlib.contextmanager
    def _listening(self, job_id: str) -> Iterator[asyncio.Event]:
        changed = asyncio.Event()
        listeners = self._listeners.setdefault(job_id, set())
        listeners.add(changed)
        try:
            yield changed
        finally:
            listeners.discard(changed)
            if not listeners:
                self._listeners.pop(job_id, None)


__all__ = ["LocalCalls"]
