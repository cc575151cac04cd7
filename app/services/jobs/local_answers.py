"""Answers of ``tracer.local()`` that a client sends over its job's WebSocket, in pieces.

Any client that follows a job may begin one, as large as a trace. So an answer for which no call waits is not
stored, nor the rest of one whose call ends meanwhile; stored bytes count against the tenant's limit.
"""

from __future__ import annotations

from app.received_bytes import Intake
from app.services.jobs.local_calls import LocalCalls
from nnsight_engine.remote_backend.frames import ANSWER_HEAD_BYTES, answer_head


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


__all__ = ["LocalAnswers"]
