"""The requests of a trace while they run: all start together, and their events are merged into one stream.

``VLLM(mode="async")`` and the server run traces through this class. Backpressure: a slow reader delays only
the outputs of its own requests. Events of its blocks are buffered meanwhile, up to a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nnsight_engine.remote_backend.backpressure import MAX_BYTES, SlowReaderError, UnreadShare
from nnsight_engine.vllm_backend.trace_router import TraceEvent, TraceRouter

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    Start = Callable[[Callable[[], None]], AsyncGenerator[RequestOutput, None]]
    """Starts a request and returns its outputs; may call its argument once the engine has the request."""


class TraceStarted(NamedTuple):
    """The engine has received all requests of the trace."""


class Output(NamedTuple):
    """An output of one of the requests.

    Attributes:
        block: The request's block.
        output: vLLM's output.
    """

    block: int
    output: RequestOutput


_Item = TraceStarted | TraceEvent | tuple[Output, asyncio.Event] | Exception | None
"""A queue item: an event, an output with an ``asyncio.Event`` to set once it is taken, an error, or None.

None marks the end of a request.
"""


class RunningTrace:
    """The requests of one trace.

    Args:
        router: Delivers the events of blocks.
        key: The trace.
        starts: Functions that start the requests, one each.
        max_pending_bytes: Limit on the size of unread events of blocks.
    """

    def __init__(
        self,
        router: TraceRouter,
        key: str,
        starts: Sequence[Start],
        *,
        max_pending_bytes: int = MAX_BYTES,
    ) -> None:
        """Prepare the trace; the requests start when ``events`` is iterated over."""
        self._router = router
        self._key = key
        self._starts = starts
        self._max_pending = max_pending_bytes
        self._share: UnreadShare | None = None
        self._running: list[asyncio.Task[None]] = []
        self._num_coming = len(starts)
        self._queue: asyncio.Queue[_Item] = (
            asyncio.Queue()
        )  # stays short: a request waits until its output is taken

    async def events(self) -> AsyncGenerator[TraceStarted | TraceEvent | Output, None]:
        """Run the requests, and yield their outputs and their blocks' events as they arrive.

        If the iteration ends early, the requests are aborted. The caller must collect or drop the state that
        the workers keep for the trace.

        Raises:
            Exception: The error of the first request that failed.
            SlowReaderError: Too many unread bytes are pending.
        """
        share = self._share = self._router.open(
            self._key, self._listen, self._drop, max_bytes=self._max_pending
        )
        running = self._running = [
            asyncio.create_task(self._run(index, start)) for index, start in enumerate(self._starts)
        ]
        try:
            left = len(running)
            while left:
                item = await self._queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                elif isinstance(item, TraceStarted | TraceEvent):
                    share.take(_num_bytes(item) if isinstance(item, TraceEvent) else 0)
                    yield item
                else:
                    output, taken = item
                    taken.set()
                    yield output
        finally:
            self._router.close(self._key)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _listen(self, event: TraceEvent) -> None:
        self._queue.put_nowait(event)
        if self._share is not None:
            self._share.add(_num_bytes(event))

    def _drop(self, error: SlowReaderError) -> None:
        """Abort the requests and drop the unread events; the next read raises ``error``."""
        self._router.close(self._key)
        for task in self._running:
            task.cancel()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    def _on_arrival(self) -> None:
        """Record that the engine has received one more of the requests."""
        self._num_coming -= 1
        if self._num_coming == 0:
            self._queue.put_nowait(TraceStarted())

    async def _run(self, index: int, start: Start) -> None:
        """Put one request's outputs into the queue, then its error, or None at its end."""
        outputs = start(self._on_arrival)
        try:
            async for output in outputs:
                for choice in output.outputs:  # vLLM keeps appending to its own list
                    choice.token_ids = list(choice.token_ids)
                taken = asyncio.Event()
                self._queue.put_nowait((Output(index, output), taken))
                await taken.wait()
        except Exception as error:  # noqa: BLE001 - raised by ``events``
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(None)
        finally:
            await outputs.aclose()


def _num_bytes(event: TraceEvent) -> int:
    return len(event.delta or b"") + len(event.printed)
