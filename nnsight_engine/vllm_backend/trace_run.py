"""A trace while it runs; however it ends, its requests are aborted and the workers drop its state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from vllm.sampling_params import RequestOutputKind

from nnsight_engine.remote_backend.backpressure import MAX_BYTES, SlowReaderError, UnreadShare
from nnsight_engine.vllm_backend.trace_router import TraceEvent, TraceListener
from nnsight_engine.vllm_backend.traced_requests import GatheredOutput, TraceRequests, results_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from vllm import RequestOutput, SamplingParams

    from nnsight_engine.vllm_backend.trace_router import TraceRouter


class FinishedTrace(NamedTuple):
    """The results of a trace that has ended.

    Attributes:
        printed: Printed text that has not been streamed yet.
        failure: One line about how a block failed; empty if none did.
        tier: How its steps ran: ``tap``, or ``eager`` if at least one of them had to run uncompiled.
        has_begun: False, by the worker's own knowledge, without a sandbox process; ``data`` has the reason.
    """

    data: bytes | memoryview
    printed: str
    failure: str
    tier: str
    has_begun: bool
    results: dict[str, Any]


class TraceHost(Protocol):
    traces: TraceRouter

    def start_request(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def begin_trace(self, key: str, num_requests: int, held: bytes | None) -> None:
        """Prepare for the requests of a trace; ``held`` are blocks that go to the workers ahead of them."""

    async def collect_trace(self, key: str, results: Mapping[str, Any], index: int) -> bytes:
        """Return the encoded results of a block whose request has ended, while the trace continues."""

    async def finish_trace(self, key: str, results: dict[str, Any]) -> FinishedTrace: ...

    async def forget_trace(self, key: str, request_ids: Sequence[str]) -> None:
        """Abort the requests of a trace and drop its state in the engine; never raises."""


class TraceRun(TraceListener):
    """The run of one trace; subclasses say what happens to its blocks' events."""

    share: UnreadShare

    def __init__(
        self, engine: TraceHost, requests: TraceRequests, *, max_pending_bytes: int = MAX_BYTES
    ) -> None:
        self.requests = requests
        self.gathered = [
            GatheredOutput(is_delta=params.output_kind is RequestOutputKind.DELTA)
            for params in requests.params
        ]
        self.is_running = False
        self._engine = engine
        self._max_pending_bytes = max_pending_bytes

    async def begin(self) -> None:
        """Prepare the engine for the requests; after this the run must be ended."""
        self.is_running = True
        requests = self.requests
        await self._engine.begin_trace(requests.key, requests.num_requests, requests.held)
        self.share = self._engine.traces.open(requests.key, self, max_bytes=self._max_pending_bytes)

    def start(self, index: int, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        """Start a request and return its outputs; the caller adds each to ``gathered`` and closes them."""
        requests = self.requests
        return self._engine.start_request(
            requests.prompts[index],
            requests.params[index],
            requests.ids[index],
            lora_request=requests.adapters[index],
            **options,
        )

    async def collect(self, index: int) -> bytes:
        results = results_of({index: self.gathered[index].output})
        return await self._engine.collect_trace(self.requests.key, results, index)

    async def finish(self) -> FinishedTrace:
        results = results_of({index: one.output for index, one in enumerate(self.gathered)})
        finished = await self._engine.finish_trace(self.requests.key, results)
        self.is_running = False
        return finished

    def stop_events(self) -> None:
        """Stop receiving events; idempotent."""
        self._engine.traces.close(self.requests.key)

    async def end(self) -> None:
        """Abort the requests and drop the trace's state in the engine, unless it is finished."""
        self.stop_events()
        if self.is_running:
            await self._engine.forget_trace(self.requests.key, self.requests.ids)


class TraceStarted(NamedTuple):
    pass


class Output(NamedTuple):
    block: int
    output: RequestOutput


class _Failure(NamedTuple):
    """The error of a request, or of the trace if there is no block."""

    block: int | None
    error: Exception


_Item = TraceStarted | TraceEvent | tuple[Output, asyncio.Event] | _Failure | None
"""A queue item: an event, an output with an ``asyncio.Event`` to set once it is taken, a failure, or None.

None marks the end of a request.
"""


class MergedRun(TraceRun):
    """A run whose outputs and events are read as one stream, ``async with run: async for event in run:``.

    A slow reader delays only the outputs of its own requests. Events are buffered meanwhile, up to a limit;
    beyond it the stream ends with ``SlowReaderError``. ``failed`` is the request whose error the stream has
    raised, or None.
    """

    def __init__(
        self, engine: TraceHost, requests: TraceRequests, *, max_pending_bytes: int = MAX_BYTES
    ) -> None:
        super().__init__(engine, requests, max_pending_bytes=max_pending_bytes)
        self.failed: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._num_unfinished = self._num_coming = len(requests.params)
        # The queue stays short: a request waits until its output is taken.
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        try:
            await self.begin()
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self.end()))
            raise
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(self._num_unfinished)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # In a task of its own: a caller may be cancelled again while it waits for the end, and the requests
        # must not continue in the engine.
        await asyncio.shield(asyncio.ensure_future(self.end()))

    async def end(self) -> None:
        self.stop_events()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TraceStarted | TraceEvent | Output:
        """Return the next output or event; raise the first failed request's error, or SlowReaderError."""
        while self._num_unfinished:
            item = await self._queue.get()
            if item is None:
                self._num_unfinished -= 1
            elif isinstance(item, _Failure):
                self._num_unfinished = 0
                self.failed = item.block
                raise item.error
            elif isinstance(item, TraceStarted):
                return item
            elif isinstance(item, TraceEvent):
                self.share.take(_num_bytes(item))
                return item
            else:
                output, taken = item
                taken.set()
                self.gathered[output.block].add(output.output)
                return output
        raise StopAsyncIteration

    def add_event(self, event: TraceEvent) -> None:
        self._queue.put_nowait(event)
        self.share.add(_num_bytes(event))

    def drop_events(self, error: SlowReaderError) -> None:
        """Abort the requests and drop the unread events; the next read raises ``error``."""
        self.stop_events()
        for task in self._tasks:
            task.cancel()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(_Failure(None, error))

    def on_arrival(self) -> None:
        self._num_coming -= 1
        if self._num_coming == 0:
            self._queue.put_nowait(TraceStarted())

    async def _run(self, index: int) -> None:
        """Put one request's outputs into the queue, then its error, or None at its end."""
        try:
            async with contextlib.aclosing(self.start(index)) as outputs:
                async for output in outputs:
                    for choice in output.outputs:  # vLLM keeps appending to its own list
                        choice.token_ids = list(choice.token_ids)
                    taken = asyncio.Event()
                    self._queue.put_nowait((Output(index, output), taken))
                    await taken.wait()
        except Exception as error:  # noqa: BLE001 - raised by ``__anext__``
            self._queue.put_nowait(_Failure(index, error))
        else:
            self._queue.put_nowait(None)


def _num_bytes(event: TraceEvent) -> int:
    return len(event.delta or b"") + len(event.printed)


__all__ = ["FinishedTrace", "MergedRun", "Output", "TraceHost", "TraceRun", "TraceStarted"]
