"""Traces whose requests a test submits itself, among others, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from nnsight_engine.remote_backend.values.outcomes import Outcome
from nnsight_engine.vllm_backend.request_tracer import RequestTracer, SentTrace
from nnsight_engine.vllm_backend.rpc_results import PENDING, answer
from nnsight_engine.vllm_backend.traced_requests import results_of
from nnsight_engine.vllm_backend.vllm import VLLM


@contextlib.contextmanager
def traced_engine(model: Path, **options: Any) -> Iterator[VLLM]:
    """Start an engine in this process, eager and in float32; in the end it holds nothing of any trace."""
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    engine = VLLM(str(model), dispatch=True, **{**defaults, **options})
    yield engine
    for counts in engine.engine.collective_rpc("count_interventions"):
        assert not any(counts.values())
    engine.shutdown()


class HeldTracer(RequestTracer):
    """A trace that is encoded and not run: ``with model.trace(prompt, tracer_cls=HeldTracer) as held:``."""

    sent: SentTrace

    @override
    def _run_model(self) -> None:
        self.sent = SentTrace(self)


@dataclasses.dataclass
class Plain:
    """A request without a block."""

    prompt: Any
    params: SamplingParams


@dataclasses.dataclass
class Ran:
    """What came of a run."""

    outcomes: dict[int, Outcome]
    outputs: dict[str, RequestOutput]
    num_steps: int

    def tokens(self, name: str) -> list[int]:
        """Return a request's tokens."""
        return list(self.outputs[name].outputs[0].token_ids)


def run_together(
    model: VLLM,
    traces: Sequence[SentTrace],
    plain: Sequence[Plain] = (),
    *,
    late: int = 0,
    abort: dict[str, int] | None = None,
    max_steps: int = 2000,
) -> Ran:
    """Run traces of one request each, and plain requests, in one engine at the same time.

    Args:
        model: The engine.
        traces: Named ``trace-0`` and so on; the outcome of each is found by its number.
        plain: Named ``plain-0`` and so on.
        late: How many steps after the plain requests the traces come.
        abort: Requests to abort, with the step after which.
        max_steps: How many steps the engine may take; those without tokens wait for sandbox processes.
    """
    engine: Any = model.engine.llm_engine
    outputs: dict[str, RequestOutput] = {}
    for number, one in enumerate(plain):
        params = one.params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        engine.add_request(f"plain-{number}", one.prompt, params)
    num_steps = 0
    waiting = list(enumerate(traces))
    while waiting or engine.has_unfinished_requests():
        if num_steps >= late:
            for number, trace in waiting:
                (params,) = trace.params
                params.output_kind = RequestOutputKind.FINAL_ONLY
                engine.add_request(f"trace-{number}", trace.prompts[0], params)
            waiting = []
        for output in engine.step():
            outputs[output.request_id] = output
        num_steps += 1
        assert num_steps < max_steps, "the engine does not come to an end"
        gone = [name for name, step in (abort or {}).items() if step == num_steps]
        if gone:
            engine.abort_request(gone)
    outcomes = {}
    for number, trace in enumerate(traces):
        own = [outputs[f"trace-{number}"]] if f"trace-{number}" in outputs else []
        found = _collected(model, trace, own)
        if found:
            outcomes[number] = found[0]
    return Ran(outcomes, outputs, num_steps)


def collected(model: VLLM, trace: SentTrace, outputs: list[RequestOutput]) -> Outcome:
    """Return the outcome of a trace of one request, which has ended."""
    (outcome,) = _collected(model, trace, outputs)
    return outcome


def _collected(model: VLLM, trace: SentTrace, outputs: list[RequestOutput]) -> list[Outcome]:
    while True:  # while a sandbox process has not answered
        found = answer(model.host.call("finish_trace", trace.key, results_of(dict(enumerate(outputs)))))
        if found != PENDING:
            return trace.read(found[0], outputs)
