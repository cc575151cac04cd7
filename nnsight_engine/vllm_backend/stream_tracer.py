"""Traces with streamed outputs: ``async for output in tracer.backend(): output.saves``.

The ``with`` block only prepares the requests. They run while the caller iterates, on the engine's own loop
(see ``engines``), and are aborted if the iteration ends early.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind

from nnsight_engine.remote_backend.errors import LostTraceError
from nnsight_engine.remote_backend.saved_deltas import SavesSoFar
from nnsight_engine.remote_backend.values.outcomes import by_name, raise_first, warn_of
from nnsight_engine.tracing.tracer import ExecutionBackend, Tracer
from nnsight_engine.vllm_backend.engines import AsyncEngine
from nnsight_engine.vllm_backend.request_tracer import RequestTracer, SentTrace
from nnsight_engine.vllm_backend.rpc_results import answer
from nnsight_engine.vllm_backend.running_trace import Output, RunningTrace
from nnsight_engine.vllm_backend.trace_router import TraceEvent
from nnsight_engine.vllm_backend.traced_requests import GatheredOutput, results_of

if TYPE_CHECKING:
    from vllm import RequestOutput

    from nnsight_engine.vllm_backend.running_trace import Start


class StreamTracer(RequestTracer):
    """``with model.trace(prompt) as tracer:`` on ``VLLM(mode="async")``."""

    sent: SentTrace | None = None

    def _run_model(self) -> None:
        """Encode the requests and store them until their outputs are iterated over."""
        self.sent = SentTrace(self, streams=True)


class StreamBackend(ExecutionBackend):
    """Prepares a trace when its block is left; a second call, without arguments, streams the outputs."""

    def __init__(self) -> None:
        self._tracer: StreamTracer | None = None

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Prepare the trace; or return an iterator over its outputs, once.

        The outputs are vLLM's, with two more attributes: ``saves``, the values that the request's block has
        saved up to the tokens of this output, by name, and ``invoke``, the block's number in its trace.

        Raises:
            ValueError: No trace is prepared, or it has been streamed already.
        """
        if tracer is not None:
            super().__call__(tracer)
            assert isinstance(tracer, StreamTracer)  # noqa: S101 - VLLM.trace chooses both
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
    """A running trace; lives on the engine's event loop."""

    def __init__(self, host: AsyncEngine, sent: SentTrace) -> None:
        """Prepare the stream; the requests start when ``outputs`` is iterated over."""
        self._host = host
        self._sent = sent
        self._saves = SavesSoFar()
        self._gathered = [
            GatheredOutput(is_delta=params.output_kind is RequestOutputKind.DELTA) for params in sent.params
        ]

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Run the requests, and yield their outputs as they arrive.

        Raises:
            BaseException: The error of a block.
        """
        sent = self._sent
        running = RunningTrace(
            self._host.router, sent.key, [self._start(one) for one in range(len(sent.params))]
        )
        try:
            async with contextlib.aclosing(running.events()) as events:
                async for event in events:
                    if isinstance(event, Output):
                        index, output = event
                        self._gathered[index].add(output)
                        output.invoke, output.saves = index, await self._saved(index, output)
                        yield output
                    elif isinstance(event, TraceEvent) and event.delta is not None:
                        self._saves.add(event.block, event.choice, event.delta)
        finally:
            await self._host.call_soon("drop_trace", sent.key)

    def _start(self, index: int) -> Start:
        sent, generate = self._sent, self._host.inner.generate
        return lambda _: generate(sent.prompts[index], sent.params[index], f"{sent.key}-{index}")

    async def _saved(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return what a block has saved by now; if its request has ended, collect the block's results."""
        if not output.finished:
            return self._saves.of(index, self._sent.params[index].n)
        sent, known = self._sent, {index: self._gathered[index].output}
        data = answer(await self._host.call_soon("collect_trace", sent.key, results_of(known), index))
        outcomes = sent.read(data, known)
        if not outcomes:
            raise LostTraceError.of({index})
        raise_first(outcomes)
        warn_of(outcomes)
        return by_name([outcome.saves for outcome in outcomes])
