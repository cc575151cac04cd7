"""Traces with streamed outputs, whose requests run on the engine's own loop while the caller iterates."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from nnsight_engine.remote_backend.errors import LostTraceError
from nnsight_engine.remote_backend.saved_deltas import SavesSoFar
from nnsight_engine.remote_backend.values.outcomes import by_name, raise_first, warn_of
from nnsight_engine.tracing.tracer import ExecutionBackend, Tracer
from nnsight_engine.vllm_backend.engines import AsyncEngine
from nnsight_engine.vllm_backend.request_tracer import RequestTracer, SentTrace
from nnsight_engine.vllm_backend.trace_router import TraceEvent
from nnsight_engine.vllm_backend.trace_run import MergedRun, Output

if TYPE_CHECKING:
    from vllm import RequestOutput

    from nnsight_engine.vllm_backend.trace_run import TraceHost


class StreamTracer(RequestTracer):
    """``with model.trace(prompt) as tracer:`` on ``VLLM(mode="async")``."""

    sent: SentTrace | None = None

    def _run_model(self) -> None:
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
        return host.across(_streamed(host.inner, sent))


async def _streamed(engine: TraceHost, sent: SentTrace) -> AsyncGenerator[RequestOutput, None]:
    saves = SavesSoFar()
    async with MergedRun(engine, sent) as run:
        async for event in run:
            if isinstance(event, Output):
                index, output = event
                output.invoke = index
                if output.finished:
                    output.saves = _saved(sent, await run.collect(index), {index: run.gathered[index].output})
                else:
                    output.saves = saves.of(index, sent.params[index].n)
                yield output
            elif isinstance(event, TraceEvent) and event.delta is not None:
                saves.add(event.block, event.choice, event.delta)


def _saved(sent: SentTrace, data: bytes, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
    outcomes = sent.read(data, outputs)
    if not outcomes:
        raise LostTraceError.of(set(outputs))
    raise_first(outcomes)
    warn_of(outcomes)
    return by_name([outcome.saves for outcome in outcomes])
