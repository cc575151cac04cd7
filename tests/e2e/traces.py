"""Traces whose requests a test submits itself, among others, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from typing_extensions import override
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from nnsight_engine.plans.records import StepResults
from nnsight_engine.remote_backend.values.outcomes import Outcome
from nnsight_engine.vllm_backend import scheduler as scheduler_module
from nnsight_engine.vllm_backend.compat import detach_results
from nnsight_engine.vllm_backend.rpc_results import PENDING, common_result
from nnsight_engine.vllm_backend.running_trace import results_of
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import RequestTracer, SentTrace
from tests.e2e.engine_kinds import options_of_process
from tests.waiting import wait_for

_COLLECT_S: Final = 120


@contextlib.contextmanager
def traced_engine(model: Path, **options: Any) -> Iterator[VLLM]:
    """Start an engine in this process, eager and in float32; in the end it holds nothing of any trace."""
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    engine = VLLM(str(model), dispatch=True, **{**defaults, **options_of_process(model), **options})
    try:
        yield engine
        if live_objects(engine):  # a worker hears of a declarative request's end with the next step
            engine.engine.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
        assert not live_objects(engine)
    finally:
        engine.shutdown()


def live_objects(model: VLLM) -> dict[str, int]:
    """Return how many objects of each kind the workers hold, without those that they hold none of."""
    held: Counter[str] = Counter()
    for counts in model.engine.collective_rpc("count_interventions"):
        held.update(counts)
    return dict(+held)


class HeldTracer(RequestTracer):
    """A trace that is encoded and not run: ``with model.trace(prompt, tracer_cls=HeldTracer) as held:``."""

    sent: SentTrace

    @override
    def _run_model(self) -> None:
        self.sent = SentTrace(self)


@dataclasses.dataclass
class Plain:
    prompt: Any
    params: SamplingParams


@dataclasses.dataclass
class Ran:
    outcomes: dict[int, Outcome]
    outputs: dict[str, RequestOutput]
    num_steps: int

    def tokens(self, name: str) -> list[int]:
        return list(self.outputs[name].outputs[0].token_ids)

    def logprobs(self, name: str) -> list[dict[int, float]]:
        """Return the log-probabilities at each of a request's tokens."""
        return [
            {token: one.logprob for token, one in step.items()}
            for step in self.outputs[name].outputs[0].logprobs or ()
        ]


def run_together(
    model: VLLM,
    traces: Sequence[SentTrace],
    plain: Sequence[Plain] = (),
    *,
    late: int = 0,
    max_steps: int = 2000,
) -> Ran:
    """Run traces of one request each, and plain requests, in one engine at the same time.

    They are named ``trace-0``, ``plain-0`` and so on. Traces come ``late`` steps after plain requests. The
    engine may take ``max_steps`` steps; those without tokens wait for sandbox processes.
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
    outcomes = {}
    for number, trace in enumerate(traces):
        own = [outputs[f"trace-{number}"]] if f"trace-{number}" in outputs else []
        found = finished(model, trace, own)
        if found:
            outcomes[number] = found[0]
    return Ran(outcomes, outputs, num_steps)


def random_state(worker: Any) -> list[int]:
    """Return the state of the generator with which a worker samples."""
    del worker
    state: list[int] = torch.default_generator.get_state().tolist()
    return state


def run_and_abort(model: VLLM, trace: SentTrace, num_tokens: int) -> dict[str, int]:
    """Abort a trace of one request when it has some tokens; return what the workers held until then.

    The workers learn of its end with the next step, which is run.
    """
    engine: Any = model.engine.llm_engine
    (params,) = trace.params
    params.output_kind = RequestOutputKind.CUMULATIVE
    engine.add_request("aborted", trace.prompts[0], params)
    outputs: list[RequestOutput] = []
    while not outputs or len(outputs[0].outputs[0].token_ids) < num_tokens:
        outputs = engine.step() or outputs
        assert not any(output.finished for output in outputs), "the request ended before it was aborted"
    held = live_objects(model)
    engine.abort_request(["aborted"])
    run_together(model, [], [Plain(trace.prompts[0], SamplingParams(max_tokens=1))])
    assert "traced" not in live_objects(model), "its block goes on"
    finished(model, trace, [])
    return held


@dataclasses.dataclass
class Recomputed:
    """How often requests lost what they had computed."""

    num_preempted: int = 0
    """For want of memory."""
    num_undone: int = 0
    """Because a step had not waited for their blocks."""


@contextlib.contextmanager
def counted_recomputations(model: VLLM) -> Iterator[Recomputed]:
    """Count preempted requests, and requests whose step was undone."""
    scheduler: Any = model.engine.llm_engine.engine_core.engine_core.scheduler
    counted = Recomputed()
    schedule = scheduler.schedule

    def num_preempted() -> int:
        return sum(request.num_preemptions for request in scheduler.requests.values())

    def counting_schedule(*args: Any, **kwargs: Any) -> Any:
        before = num_preempted()
        step = schedule(*args, **kwargs)
        counted.num_preempted += num_preempted() - before
        return step

    def counting_detach(output: Any) -> StepResults | None:
        results = detach_results(output)
        counted.num_undone += 0 if results is None else len(results.undone)
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "schedule", counting_schedule)
        patch.setattr(scheduler_module, "detach_results", counting_detach)
        yield counted


def collected(model: VLLM, trace: SentTrace, outputs: list[RequestOutput]) -> Outcome:
    (outcome,) = finished(model, trace, outputs)
    return outcome


def finished(model: VLLM, trace: SentTrace, outputs: list[RequestOutput]) -> list[Outcome]:
    """Return the outcomes of a trace whose requests have ended, wherever its blocks ran."""

    def found() -> Any:
        saved = common_result(
            model.host.call("finish_trace", trace.key, results_of(dict(enumerate(outputs))))
        )
        return None if saved == PENDING else saved

    return trace.read(wait_for(found, _COLLECT_S, "the sandbox process's answer")[0], outputs)
