"""Pending calls of ``tracer.local()``: parts of blocks that the job's client runs, over its WebSocket.

A job has at most one at a time. Every client that offers to answer receives it, also one that connects later;
the first answer counts. Call numbers are never reused, so that a late answer cannot match another call.

Any client that follows a job may begin an answer, as large as a trace. So an answer for which no call waits
is not stored, nor the rest of one whose call ends meanwhile; stored bytes count against the tenant's limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Iterator

from app.limits.allowances import Intake
from nnsight_engine.remote_backend.frames import ANSWER_HEAD_BYTES, Frame, answer_head, calling

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


class LocalAnswers:
    def __init__(self, calls: LocalCalls, job_id: str, intake: Intake, max_bytes: int) -> None:
        self._calls = calls
        self._job_id = job_id
        self._intake = intake
        self._max_bytes = max_bytes
        self._head = bytearray()
        self._number = 0
        self._num_left = 0
        self._body: bytearray | None = None

    def feed(self, data: bytes) -> None:
        """Process more bytes, and deliver the answers that they complete.

        Raises ApiError ``rate_limit_exceeded`` without memory, DecodeError for bytes that are no answer.
        """
        rest = memoryview(data)
        while rest:
            is_open = len(self._head) == ANSWER_HEAD_BYTES
            rest = self._take_body(rest) if is_open else self._take_head(rest)
            if len(self._head) == ANSWER_HEAD_BYTES and not self._num_left:
                self._end()

    def close(self) -> None:
        self._drop()

    def _take_head(self, rest: memoryview) -> memoryview:
        num = ANSWER_HEAD_BYTES - len(self._head)
        self._head += rest[:num]
        found = answer_head(self._head, self._max_bytes)
        if found is not None:
            self._number, self._num_left = found
            self._body = bytearray()
        return rest[num:]

    def _take_body(self, rest: memoryview) -> memoryview:
        piece = rest[: self._num_left]
        if not self._calls.is_waiting(self._job_id, self._number):
            self._drop()
        if self._body is not None:
            self._intake.add(len(piece))
            self._body += piece
        self._num_left -= len(piece)
        return rest[len(piece) :]

    def _end(self) -> None:
        body, self._head = self._body, bytearray()
        self._drop()
        if body is not None:
            self._calls.answer(self._job_id, self._number, body)

    def _drop(self) -> None:
        if self._body is not None:
            self._intake.release(len(self._body))
        self._body = None
