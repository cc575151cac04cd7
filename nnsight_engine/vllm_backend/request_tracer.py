"""Traces whose blocks run in vLLM's workers: encoding into requests, and decoding of their results."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.remote_backend.values.outcomes import (
    Outcome,
    assign_saved,
    groups_of,
    parts_of,
    raise_first,
    read_outcomes,
    saved_containers,
    wanted_of,
)
from nnsight_engine.remote_backend.values.received_blocks import SAVED
from nnsight_engine.serialization import DATA_ONLY, encode_trace
from nnsight_engine.vllm_backend.prompts import Request
from nnsight_engine.vllm_backend.sampling import sampling_params
from nnsight_engine.vllm_backend.traced_requests import TraceRequests
from nnsight_engine.vllm_backend.traces.caches import HOME_CLASSES
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.points import place_named
from nnsight_engine.vllm_backend.traces.references import reference_of

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
        self._saved = saved_containers([part.own for part in self._parts])
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
                self.key, index, params.n, data, groups, streams, chosen,
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
