"""Pending calls of ``tracer.local()``: parts of blocks that the job's client runs, over its WebSocket.

A job has at most one at a time. Every client that offers to answer receives it, also one that connects later;
the first answer counts. Call numbers are never reused, so that a late answer cannot match another call.

Any client that follows a job may begin an answer, as large as a trace. So an answer for which no call waits
is not stored, nor the rest of one whose call ends meanwhile. Stored bytes count against the tenant's limit
until the engine has the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from app.limits.limit import Spending
from nnsight_engine.remote_backend.frames import ANSWER_HEAD_BYTES, Frame, answer_head, calling

Bytes = bytes | bytearray | memoryview


@dataclasses.dataclass(slots=True)
class _PendingCall:
    """``received`` counts the answer's bytes for its tenant, None until there is one."""

    number: int
    frame: Frame
    answer: asyncio.Future[Bytes]
    received: Spending | None = None

    def deliver(self, answer: Bytes, received: Spending) -> None:
        self.received = received
        self.answer.set_result(answer)


class LocalCalls:
    """``pending`` has the call of each job that waits for an answer."""

    def __init__(self, timeout_s: float) -> None:
        self.pending: dict[str, _PendingCall] = {}
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._called = asyncio.Event()

    @contextlib.asynccontextmanager
    async def call(self, job_id: str, data: Bytes) -> AsyncIterator[Bytes]:
        """Send a call to a job's client, and yield its answer; raises TimeoutError if none comes.

        The bytes of the answer count against the tenant's limit up to the end of the block.
        """
        number = next(self._numbers)
        call = _PendingCall(number, calling(number, data), asyncio.get_running_loop().create_future())
        self.pending[job_id] = call
        called, self._called = self._called, asyncio.Event()
        called.set()
        try:
            try:
                answer = await asyncio.wait_for(call.answer, self._timeout_s)
            finally:
                if self.pending.get(job_id) is call:
                    del self.pending[job_id]
            yield answer
        finally:
            if call.received is not None:
                call.received.close()

    async def frames(self, job_id: str) -> AsyncGenerator[Frame, None]:
        """Yield the calls to a job's client; never ends."""
        last_number = 0
        while True:
            call, called = self.pending.get(job_id), self._called
            if call is not None and call.number != last_number:
                last_number = call.number
                yield call.frame
            else:
                await called.wait()

    def waiting(self, job_id: str, number: int) -> _PendingCall | None:
        """Return the call with this number if it still waits for its answer, else None."""
        call = self.pending.get(job_id)
        return None if call is None or call.number != number or call.answer.done() else call


class LocalAnswers:
    """The answers of one client, one after another; ``new_spending`` returns what counts the bytes of one."""

    def __init__(
        self, calls: LocalCalls, job_id: str, new_spending: Callable[[], Spending], max_bytes: int
    ) -> None:
        self._calls = calls
        self._job_id = job_id
        self._new_spending = new_spending
        self._max_bytes = max_bytes
        self._head = bytearray()
        self._number = 0
        self._num_left = 0  # bytes of the body that have not arrived
        self._body = bytearray()
        self._received: Spending | None = None  # None if the body is skipped

    def feed(self, data: bytes) -> None:
        """Process more bytes, and deliver the answers that they complete.

        Raises ApiError ``rate_limit_exceeded`` without memory, DecodeError for bytes that are no answer.
        """
        unread = memoryview(data)
        while unread:
            is_open = len(self._head) == ANSWER_HEAD_BYTES
            unread = self._read_body(unread) if is_open else self._read_head(unread)
            if len(self._head) == ANSWER_HEAD_BYTES and not self._num_left:
                self._finish_answer()

    def close(self) -> None:
        if self._received is not None:
            self._received.close()
        self._received, self._body = None, bytearray()

    def _read_head(self, unread: memoryview) -> memoryview:
        """Read bytes of an answer's head, the call's number and the size; return the bytes behind them."""
        num_missing = ANSWER_HEAD_BYTES - len(self._head)
        self._head += unread[:num_missing]
        number_and_size = answer_head(self._head, self._max_bytes)
        if number_and_size is not None:
            self._number, self._num_left = number_and_size
            self._received = self._new_spending()
        return unread[num_missing:]

    def _read_body(self, unread: memoryview) -> memoryview:
        """Read bytes of an answer, or skip them if no call waits for it; return those behind them."""
        piece = unread[: self._num_left]
        if self._calls.waiting(self._job_id, self._number) is None:
            self.close()
        if self._received is not None:
            self._received.add(len(piece))
            self._body += piece
        self._num_left -= len(piece)
        return unread[len(piece) :]

    def _finish_answer(self) -> None:
        """Deliver a whole answer if its call still waits, and begin with the next."""
        self._head = bytearray()
        call = self._calls.waiting(self._job_id, self._number)
        if self._received is not None and call is not None:
            call.deliver(self._body, self._received)
            self._received = None
        self.close()
