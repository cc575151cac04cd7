"""Traces whose blocks run in vLLM's workers: encoding into requests, and decoding of their results.

A scan returns the shapes of all values without their data, but of a real request, as vLLM needs real tensors.
The requests of streamed outputs run on the engine's own loop while the caller iterates.
"""

from __future__ import annotations

import difflib
import enum
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm import SamplingParams

from nnsight_engine.core.trees import tensors
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.remote_backend.errors import LostTraceError
from nnsight_engine.remote_backend.saved_deltas import SavesSoFar
from nnsight_engine.remote_backend.values.outcomes import (
    Outcome,
    assign_saved,
    by_name,
    groups_of,
    parts_of,
    raise_first,
    read_outcomes,
    saved_containers,
    wanted_of,
    warn_of,
)
from nnsight_engine.remote_backend.values.received_blocks import SAVED
from nnsight_engine.serialization import DATA_ONLY, encode_trace
from nnsight_engine.tracing.tracer import ExecutionBackend, Tracer
from nnsight_engine.vllm_backend.engines import AsyncEngine
from nnsight_engine.vllm_backend.prompts import Request
from nnsight_engine.vllm_backend.running_trace import MergedRun, Output, TraceEvent, TraceRequests
from nnsight_engine.vllm_backend.traces.caches import HOME_CLASSES
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.points import place_named, reference_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm import RequestOutput

    from nnsight_engine.vllm_backend.running_trace import TraceHost

_NAMES: Final = tuple(name for name in SamplingParams.__struct_fields__ if not name.startswith("_"))


def sampling_params(request: Request, shared: Mapping[str, Any]) -> SamplingParams:
    """Return a request's sampling parameters as a new object; raise TypeError or VLLMValidationError."""
    params, named = request.sampling_over(shared)
    _refuse_unknown(named)
    if params is None:
        return SamplingParams(**named)
    if not isinstance(params, SamplingParams):
        raise TypeError(
            f"sampling_params= takes vLLM's SamplingParams, got {type(params).__name__}; give parameters by "
            "name instead, `temperature=0.0, max_tokens=8`"
        )
    # Replacing fields validates the object again, and recomputes the fields derived from them.
    return msgspec.structs.replace(params.clone(), **named)


def _refuse_unknown(names: Iterable[str]) -> None:
    for name in names:
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_NAMES)}"
            raise TypeError(f"vLLM has no sampling parameter {name}; {hint}")


if TYPE_CHECKING:
    from vllm import RequestOutput

    from nnsight_engine.vllm_backend.vllm import VLLM

    Outputs = Sequence[RequestOutput] | Mapping[int, RequestOutput]

_HOME = DATA_ONLY.allowing(HOME_CLASSES)
"""Policy for decoding results: only data and caches of data, whichever process returned them."""


class RequestTracer(InterleavingTracer):
    """``with model.trace(prompt) as tracer:`` on ``VLLM``; each invoke is a request of its own."""

    model: VLLM

    def _run_model(self) -> Any:
        """Run the trace and assign what its blocks saved; return the only request's output, or a list."""
        trace = SentTrace(self)
        outcomes, outputs = self._send(trace)
        trace.assign_saved(outcomes)
        return outputs[0] if len(outputs) == 1 else outputs

    def _send(self, trace: SentTrace) -> tuple[list[Outcome], list[RequestOutput]]:
        data, outputs = self.model.host.run_trace(trace)
        return trace.read(data, outputs), outputs

    def _validate(self) -> None:
        """Run the blocks once as a rehearsal, on as few tokens as they need; raise their first error."""
        outcomes, _ = self._send(SentTrace(self, Purpose.CHECK))
        raise_first(outcomes)

    def reference(self, value: Any) -> tuple[str, ...] | None:
        """Return the name of an object that exists in the worker and is not sent, or None."""
        return reference_of(value, self.model, self.barriers)


class Purpose(enum.Enum):
    """Why a trace is sent: for its results, to check that its blocks run, or for shapes only."""

    RUN = enum.auto()
    CHECK = enum.auto()
    SCAN = enum.auto()


class SentTrace(TraceRequests):
    def __init__(
        self, tracer: RequestTracer, purpose: Purpose = Purpose.RUN, *, streams: bool = False
    ) -> None:
        """Encode the blocks; if ``streams``, the worker sends newly saved values after each step.

        Raises:
            EncodeError: A block uses a value that cannot be encoded.
            ValueError: A request selects an unknown edit.
        """
        super().__init__(uuid.uuid4().hex)
        self._tracer = tracer
        self._purpose = purpose
        self._parts = parts_of(tracer)
        self._saved = saved_containers([part.cells for part in self._parts])
        inputs = tracer.batcher.inputs
        assert inputs is not None  # noqa: S101 - there is at least one request
        requests: Sequence[Request] = inputs[0]
        data = encode_trace(
            [part.as_sent() for part in self._parts],
            shared={SAVED: self._saved},
            reference=tracer.reference,
        )
        shared = {**tracer.batcher.shared_kwargs}
        edits, adapter = shared.pop("edits", None), shared.pop("lora_request", None)
        wanted = wanted_of(self._parts)
        groups = groups_of(self._parts)
        for index, request in enumerate(requests):
            params = sampling_params(request, shared)
            if purpose is not Purpose.RUN:
                params.n = 1
            # With several requests a block may wait for another block's later step, so they are checked on
            # all tokens.
            chosen = tracer.model.chosen_edits(edits if request.edits is None else request.edits)
            entry = TraceEntry(
                self.key, index, params.n, data, groups, streams=streams, edits=chosen,
                is_dry_run=purpose is Purpose.CHECK and params.max_tokens != 1 and len(requests) == 1,
                is_scan=purpose is Purpose.SCAN, wanted=wanted, sandbox_of=None,
            )  # fmt: skip
            self.add(request.prompt, params, entry, adapter=request.lora_request or adapter)

    def read(self, data: bytes | memoryview, outputs: Outputs) -> list[Outcome]:
        """Decode the outcome of each block, and fill the containers that were saved before the blocks ran."""

        def resolve(reference: tuple[str, ...]) -> Any:
            kind, name = reference
            return outputs[int(name)] if kind == "result" else place_named(self._tracer.model, kind, name)

        # A scan returns shapes only.
        device = "meta" if self._purpose is Purpose.SCAN else "cpu"
        fills = self._purpose is not Purpose.CHECK
        return read_outcomes(data, self._saved, resolve=resolve, policy=_HOME, device=device, fills=fills)

    def assign_saved(self, outcomes: Sequence[Outcome]) -> None:
        assign_saved(self._parts, outcomes)


class RequestScanner(RequestTracer):
    """``with model.scan(prompt):`` on ``VLLM``; afterwards envoys return values without data."""

    def _run_model(self) -> Any:
        """Run the trace as ``RequestTracer`` does, and keep the shapes of all values in the envoys."""
        trace = SentTrace(self, Purpose.SCAN)
        outcomes, outputs = self._send(trace)
        trace.assign_saved(outcomes)
        if outcomes:
            self._leave(outcomes[0].shapes, len(outputs[0].prompt_token_ids or ()))
        return outputs[0] if len(outputs) == 1 else outputs

    def _leave(self, shapes: Mapping[str, Mapping[str, Any]], num_tokens: int) -> None:
        """Give each envoy the values of its module, without data, for use after the trace."""
        for path, envoy in self.model.named_modules():
            envoy._fake.update(shapes.get(path, {}))  # noqa: SLF001 - local scans store theirs there too
        points = self.model.points
        layer = shapes.get(str(points.layer(0).path), {})
        layer_output = next(tensors(layer.get("output")), None)
        if layer_output is not None:
            points.scanned = (num_tokens, layer_output.dtype)


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
    """Run a trace, and yield its outputs with ``saves`` and ``invoke``, see ``StreamBackend``."""
    saves = SavesSoFar()
    async with MergedRun(engine, sent) as run:
        async for event in run:
            if isinstance(event, Output):
                index, output = event
                output.invoke = index
                if output.finished:
                    output.saves = _saved(sent, await run.collect(index), {index: run.gathered[index].output})
                else:
                    output.saves = saves.values_of_block(index, sent.params[index].n)
                yield output
            elif isinstance(event, TraceEvent) and event.delta is not None:
                saves.add(event.block, event.choice, event.delta)


def _saved(sent: SentTrace, data: bytes, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
    """Return what the block of an ended request has saved, by name; raise the block's error."""
    outcomes = sent.read(data, outputs)
    if not outcomes:
        raise LostTraceError.of(set(outputs))
    raise_first(outcomes)
    warn_of(outcomes)
    return by_name([outcome.saves for outcome in outcomes])
