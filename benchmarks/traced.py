"""Traced requests in an engine of this process, submitted by hand so that its steps can be timed one by one.

A trace saves what some layers return at every step. The caller submits it, runs the steps, and checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import RequestOutputKind

from nnsight_engine import save
from nnsight_engine.vllm_backend.request_tracer import RequestTracer, SentTrace
from nnsight_engine.vllm_backend.traced_requests import results_of
from nnsight_engine.vllm_backend.vllm import VLLM


class TraceCheckError(Exception):
    """A trace did not save what its block asks for."""


class _Deferred(RequestTracer):
    """A trace whose request is submitted by hand."""

    sent: SentTrace

    def _run_model(self) -> None:
        self.sent = SentTrace(self)


def submit_traced(model: VLLM, prompt: Sequence[int], max_tokens: int, layers: Sequence[int]) -> SentTrace:
    """Queue a request that generates exactly ``max_tokens`` greedy tokens; its id is the trace's key."""
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
    with model.trace(list(prompt), tracer_cls=_Deferred, **options) as tracer:
        kept = save([])
        for _ in tracer.iter[:]:
            for layer in layers:
                kept.append(model.layers[layer].output)
    sent: SentTrace = tracer.sent
    (params,) = sent.params
    params.output_kind = RequestOutputKind.FINAL_ONLY
    model.engine.llm_engine.add_request(sent.key, sent.prompts[0], params)
    return sent


def check_traced(model: VLLM, trace: SentTrace, output: Any, num_layers: int) -> None:
    """Collect what a trace saved; raises its error, and TraceCheckError where a step is missing."""
    (data,) = model.host.call("collect_trace", trace.key, results_of({0: output}))
    (outcome,) = trace.read(data, [output])
    if outcome.error is not None:
        raise outcome.error
    num_kept, num_wanted = len(outcome.saves["kept"]), num_layers * len(output.outputs[0].token_ids)
    if num_kept != num_wanted:
        raise TraceCheckError(
            f"a trace must save {num_wanted} values, one for each layer and token, it saved {num_kept}"
        )
