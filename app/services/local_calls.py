"""Parts of blocks that wait for their clients: ``tracer.local()``, asked over the jobs' WebSockets.

A job has at most one such call at a time. Whoever follows the job and says that it answers is sent it, also
who comes later; the first answer counts. Numbers never come twice, so that nobody answers for another call.
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
class _Call:
    """What a client is asked.

    Attributes:
        number: The call's own.
        frame: What is sent.
        answer: What comes back.
    """

    number: int
    frame: Frame
    answer: asyncio.Future[Bytes]


class LocalCalls:
    """The calls of all jobs that run here.

    Args:
        timeout_s: How long one waits for its answer.
    """

    def __init__(self, timeout_s: float) -> None:
        """Begin without calls."""
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._pending: dict[str, _Call] = {}
        self._listeners: dict[str, set[asyncio.Event]] = {}

    @property
    def num_pending(self) -> int:
        """How many wait for an answer."""
        return len(self._pending)

    async def ask(self, job_id: str, data: Bytes) -> Bytes:
        """Ask a job's client, and return its answer.

        Raises:
            TimeoutError: There is none in time.
        """
        number = next(self._numbers)
        call = _Call(number, calling(number, data), asyncio.get_running_loop().create_future())
        self._pending[job_id] = call
        for listener in self._listeners.get(job_id, ()):
            listener.set()
        try:
            return await asyncio.wait_for(call.answer, self._timeout_s)
        finally:
            if self._pending.get(job_id) is call:
                del self._pending[job_id]

    async def frames(self, job_id: str) -> AsyncGenerator[Frame, None]:
        """Yield what a job's client is asked, for ever."""
        last = 0
        with self._listening(job_id) as news:
            while True:
                news.clear()
                call = self._pending.get(job_id)
                if call is not None and call.number != last:
                    last = call.number
                    yield call.frame
                else:
                    await news.wait()

    def is_waiting(self, job_id: str, number: int) -> bool:
        """Tell whether a call of a job still waits for its answer."""
        call = self._pending.get(job_id)
        return call is not None and call.number == number and not call.answer.done()

    def answer(self, job_id: str, number: int, data: Bytes) -> None:
        """Take a client's answer; one that nobody waits for any more is dropped."""
        if self.is_waiting(job_id, number):
            self._pending[job_id].answer.set_result(data)

    @contextlib.contextmanager
    def _listening(self, job_id: str) -> Iterator[asyncio.Event]:
        news = asyncio.Event()
        listeners = self._listeners.setdefault(job_id, set())
        listeners.add(news)
        try:
            yield news
        finally:
            listeners.discard(news)
            if not listeners:
                self._listeners.pop(job_id, None)


__all__ = ["LocalCalls"]
