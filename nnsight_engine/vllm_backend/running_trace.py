"""A trace while it runs; however it ends, its requests are aborted and the workers drop its state.

Events of running blocks reach their traces just before vLLM processes the outputs.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import copy
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import msgspec
from vllm.sampling_params import RequestOutputKind

from nnsight_engine.remote_backend.unread_output import MAX_BYTES, Backpressure, SlowReaderError, UnreadShare
from nnsight_engine.vllm_backend.fair_scheduler import SENDER_KEY
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY, TraceEntry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from vllm import RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest


class TraceRequests:
    """The requests of one trace, one for each block; ``held`` blocks go to the workers ahead of them.

    ``ids`` must be unique: aborting a shared id aborts all of its requests.
    """

    def __init__(self, key: str, held: bytes | None = None) -> None:
        """Begin without requests; ``held`` are encoded blocks that the workers get ahead of them."""
        self.key = key
        self.held = held
        self.prompts: list[dict[str, Any]] = []
        self.params: list[SamplingParams] = []
        self.ids: list[str] = []
        self.adapters: list[LoRARequest | None] = []

    @property
    def num_requests(self) -> int:
        return sum(params.n for params in self.params)

    def add(
        self,
        prompt: Mapping[str, Any],
        params: SamplingParams,
        entry: TraceEntry,
        *,
        sender: str = "",
        request_id: str = "",
        adapter: LoRARequest | None = None,
    ) -> None:
        """Add the next block's request; ``params`` receive the entry, ``request_id`` is its id's prefix."""
        if adapter is not None:
            entry = msgspec.structs.replace(entry, adapter=adapter.lora_int_id)
        params.extra_args = {**(params.extra_args or {}), TRACE_KEY: entry.to_plain()}
        if sender:
            params.extra_args[SENDER_KEY] = sender
        # A block may read and write at any position, so the request must not share the KV cache.
        params.skip_reading_prefix_cache = True
        self.params.append(params)
        self.adapters.append(adapter)
        self.prompts.append({**prompt, "cache_salt": f"{self.key}{entry.index:x}"})
        self.ids.append("-".join(filter(None, (request_id, self.key, str(entry.index)))))


def results_of(outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
    """Return the results of requests as plain values, by ``"<block>/<choice>"``."""
    return {
        f"{index}/{choice.index}": {
            "request": f"{index}",
            "prompt": output.prompt,
            "prompt_token_ids": list(output.prompt_token_ids or ()),
            "text": choice.text,
            "token_ids": list(choice.token_ids),
            "finish_reason": choice.finish_reason,
        }
        for index, output in outputs.items()
        for choice in output.outputs
    }


class GatheredOutput:
    """All outputs of a request so far, merged into one with all its choices."""

    output: RequestOutput

    def __init__(self, *, is_delta: bool) -> None:
        """Create an empty output; with ``is_delta``, each output has only news since the one before."""
        self._is_delta = is_delta
        self._choices: dict[int, Any] = {}

    def add(self, output: RequestOutput) -> None:
        """Merge the request's next output into ``output``."""
        for choice in output.outputs:
            before = self._choices.get(choice.index)
            so_far = copy.copy(choice)
            if self._is_delta and before is not None:
                so_far.text = before.text + choice.text
                so_far.token_ids = [*before.token_ids, *choice.token_ids]
            self._choices[choice.index] = so_far
        self.output = copy.copy(output)
        self.output.outputs = [self._choices[index] for index in sorted(self._choices)]


logger = logging.getLogger(__name__)


class TraceEvent(NamedTuple):
    """Newly saved values, None for none, and printed text that a block sent after a step."""

    block: int
    choice: int
    delta: bytes | None
    printed: str


class TraceRouter:
    """Passes the events of blocks on to the runs of their traces."""

    def __init__(self, unread: Backpressure | None = None) -> None:
        self._unread = unread or Backpressure()
        self._open: dict[str, tuple[TraceRun, UnreadShare]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, key: str, run: TraceRun, *, max_bytes: int = MAX_BYTES) -> UnreadShare:
        """Register a run, and return its share of unread bytes; the caller must ``close`` it."""
        share = self._unread.share(run.drop_events, max_bytes)
        self._open[key] = run, share
        return share

    def close(self, key: str) -> None:
        """Remove a trace and its share of unread bytes; later events of the trace are dropped."""
        opened = self._open.pop(key, None)
        if opened is not None:
            _, share = opened
            share.close()

    def note_arrival(self, key: str) -> None:
        """Tell a trace's run that the engine has one more of its requests."""
        opened = self._open.get(key)
        if opened is not None:
            run, _ = opened
            run.on_arrival()

    def deliver(self, payload: Sequence[Any], choice: int) -> None:
        """Pass on what blocks sent for one choice: a list of key, block, encoded values and printed text."""
        for key, index, delta, printed in payload:
            opened = self._open.get(key)
            if opened is None:
                continue
            run, _ = opened
            try:
                run.add_event(TraceEvent(index, choice, delta, printed))
            except Exception:  # an error in vLLM's output handler, which calls this, would end the engine
                logger.exception("an event of a block could not be delivered")


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


class TraceRun(abc.ABC):
    """The run of one trace; subclasses say what happens to its blocks' events."""

    share: UnreadShare

    def __init__(
        self, engine: TraceHost, requests: TraceRequests, *, max_pending_bytes: int = MAX_BYTES
    ) -> None:
        """Prepare a run; its unread events may have ``max_pending_bytes`` together."""
        self.requests = requests
        self.gathered = [
            GatheredOutput(is_delta=params.output_kind is RequestOutputKind.DELTA)
            for params in requests.params
        ]
        self.is_running = False
        self._engine = engine
        self._max_pending_bytes = max_pending_bytes

    @abc.abstractmethod
    def add_event(self, event: TraceEvent) -> None: ...

    @abc.abstractmethod
    def drop_events(self, error: SlowReaderError) -> None:
        """Drop the unread events, since they exceed a limit."""

    def on_arrival(self) -> None:  # noqa: B027 - optional
        """Record that the engine has received one of the trace's requests."""

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
        """Collect the results of the trace, whose requests have ended; the engine then drops its state."""
        results = results_of({index: gathered.output for index, gathered in enumerate(self.gathered)})
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
