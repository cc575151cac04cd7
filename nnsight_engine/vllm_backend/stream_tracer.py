"""Traces whose outputs are streamed: ``async for output in tracer.backend(): output.saves``.

The ``with`` block only prepares the requests. They run while somebody iterates, on the engine's own loop (see
``engines``), and end when the iteration does, at its end or before.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind

from nnsight_engine.remote_backend.errors import LostTraceError
from nnsight_engine.remote_backend.outcomes import by_name, raise_first
from nnsight_engine.tracing.tracer import ExecutionBackend, Tracer
from nnsight_engine.vllm_backend.answers import answer
from nnsight_engine.vllm_backend.engines import AsyncEngine
from nnsight_engine.vllm_backend.request_tracer import RequestTracer, SentTrace

if TYPE_CHECKING:
    from vllm import RequestOutput


class StreamTracer(RequestTracer):
    """``with model.trace(prompt) as tracer:`` on ``VLLM(mode="async")``."""

    sent: SentTrace | None = None

    def _run_model(self) -> None:
        """Keep the requests until somebody iterates over their outputs."""
        self.sent = SentTrace(self, streams=True)


class StreamBackend(ExecutionBackend):
    """Prepares a trace when its block is left; called again, without arguments, it streams the outputs."""

    def __init__(self) -> None:
        """Wait for a trace."""
        self._tracer: StreamTracer | None = None

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Prepare the trace; or return an iterator over its outputs, once.

        The outputs are vLLM's, with two attributes more: ``saves``, what the request's block has saved up to
        the tokens of this output, by name, and ``invoke``, the block's number in its trace.

        Raises:
            ValueError: Nothing is prepared, or it has been streamed already.
        """
        if tracer is not None:
            super().__call__(tracer)
            assert isinstance(tracer, StreamTracer)  # noqa: S101 - VLLM.trace pairs them
            self._tracer = tracer
            return None
        if self._tracer is None or self._tracer.sent is None:
            raise ValueError(
                "there is nothing to stream: a trace's outputs can be iterated over once, after its `with` "
                "block"
            )
        sent, self._tracer.sent = self._tracer.sent, None
        host = self._tracer.model.host
        assert isinstance(host, AsyncEngine)  # noqa: S101 - as above
        return host.across(TraceStream(host, sent).outputs())


class TraceStream:
    """A trace whose requests are running; on the engine's loop."""

    def __init__(self, host: AsyncEngine, sent: SentTrace) -> None:
        """Nothing runs before ``outputs`` is iterated over."""
        self._host = host
        self._sent = sent
        self._queue: asyncio.Queue[RequestOutput | BaseException | None] = asyncio.Queue()

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Run the requests, and yield their outputs as they come.

        Raises:
            BaseException: What a block raised.
        """
        sent, router = self._sent, self._host.router
        router.open(sent.key)
        running = [asyncio.create_task(self._run(index)) for index in range(len(sent.params))]
        try:
            left = len(running)
            while left:
                item = await self._queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            router.close(sent.key)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._host.call_soon("drop_trace", sent.key)

    async def _run(self, index: int) -> None:
        """Put one request's outputs into the queue, then what it raised or None."""
        try:
            async for output in self._request(index):
                self._queue.put_nowait(output)
        except Exception as error:  # noqa: BLE001 - raised where the outputs are read
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(None)

    async def _request(self, index: int) -> AsyncIterator[RequestOutput]:
        sent, params = self._sent, self._sent.params[index]
        gathered = _Gathered(is_delta=params.output_kind is RequestOutputKind.DELTA)
        outputs = self._host.inner.generate(sent.prompts[index], params, f"{sent.key}-{index}")
        try:
            async for output in outputs:
                for choice in output.outputs:  # vLLM goes on appending to its own list
                    choice.token_ids = list(choice.token_ids)
                gathered.add(output)
                if output.finished:
                    saves = await self._closed(index, gathered.output)
                else:
                    saves = by_name(self._host.router.saves(sent.key, index, params.n))
                output.invoke, output.saves = index, saves
                yield output
        finally:
            await outputs.aclose()

    async def _closed(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """End a block whose request has ended, and return what it saved; raises what it raised."""
        sent, known = self._sent, {index: output}
        data = answer(await self._host.call_soon("collect_trace", sent.key, sent.results(known), index))
        outcomes = sent.read(data, known)
        if not outcomes:
            raise LostTraceError.of({index})
        raise_first(outcomes)
        return by_name([outcome.saves for outcome in outcomes])


class _Gathered:
    """A request's outputs so far as one, with all its choices."""

    output: RequestOutput

    def __init__(self, *, is_delta: bool) -> None:
        self._is_delta = is_delta
        self._choices: dict[int, Any] = {}

    def add(self, output: RequestOutput) -> None:
        """Take the next one."""
        for choice in output.outputs:
            before = self._choices.get(choice.index)
            now = copy.copy(choice)
            if self._is_delta and before is not None:
                now.text = before.text + choice.text
                now.token_ids = [*before.token_ids, *choice.token_ids]
            self._choices[choice.index] = now
        self.output = copy.copy(output)
        self.output.outputs = [self._choices[index] for index in sorted(self._choices)]
