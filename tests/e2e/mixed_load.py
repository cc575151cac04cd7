"""Requests of three kinds in one engine, which join, are aborted and end at steps of a seeded random choice.

A ``Definition`` can be submitted any number of times: plain, declarative or traced. ``Load.run`` submits
many, steps the engine until all have ended, and hands each one's ``Answer`` to the test as soon as it is
there, so that nothing of a request outlives it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm import RequestOutput
from vllm.sampling_params import RequestOutputKind

from nnsight_engine.vllm_backend.request_tracer import SentTrace
from nnsight_engine.vllm_backend.traced_requests import results_of
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.harness import Ask, Engine, Pending

PLAIN, DECLARATIVE, TRACED = KINDS = ("plain", "declarative", "traced")
_MAX_STEPS = 20_000


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """A request that can be made again and again.

    Attributes:
        name: For messages.
        kind: One of the three.
        ask: What to submit, of a plain or declarative one.
        open: Makes the trace, of a traced one.
    """

    name: str
    kind: str
    ask: Ask | None = None
    open: Callable[[], SentTrace] | None = None


@dataclasses.dataclass
class Answer:
    """What came of a request.

    Attributes:
        values: Everything that must be the same each time: numbers, texts, tensors, in a tree.
        error: The type and message of what the block raised.
        gap: The smallest distance between the best and the next token, in logarithms, at any step.
    """

    values: Any
    error: tuple[type, str] | None
    gap: float


@dataclasses.dataclass
class Flight:
    """A request of one or more parts that is in the engine."""

    definition: Definition
    names: list[str]
    pending: Pending | None
    trace: SentTrace | None
    abort_after: int | None
    steps: int = 0
    aborted: bool = False
    outputs: dict[str, RequestOutput | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Happened:
    """What the engine's scheduler did, by kind of request."""

    preempted: Counter[str] = dataclasses.field(default_factory=Counter)
    chunked: Counter[str] = dataclasses.field(default_factory=Counter)
    aborted: Counter[str] = dataclasses.field(default_factory=Counter)
    num_steps: int = 0


class Load:
    """Submits requests to an engine in this process and steps it."""

    def __init__(self, model: VLLM) -> None:
        """Use the model's engine."""
        self.model = model
        self.engine = Engine.around(model.engine)
        self.core: Any = model.engine.llm_engine
        self.scheduler: Any = self.core.engine_core.engine_core.scheduler
        self.happened = Happened()
        self._number = 0
        self._seen_chunked: set[str] = set()

    def alone(self, definition: Definition) -> Answer:
        """Return what comes of a request that has the engine to itself."""
        answers: list[Answer] = []
        self.run([definition], random.Random(0), lambda _, answer: answers.append(answer), at_once=1)
        return answers[0]

    def run(
        self,
        definitions: Sequence[Definition],
        choices: random.Random,
        answered: Callable[[Definition, Answer], None],
        *,
        at_once: int,
        abort_one_in: int = 0,
    ) -> None:
        """Run requests, about ``at_once`` at a time, and abort some of them at some step."""
        waiting = list(definitions)[::-1]
        flying: list[Flight] = []
        while waiting or flying:
            while waiting and len(flying) < at_once and choices.random() < 0.7:
                is_aborted = abort_one_in and not choices.randrange(abort_one_in)
                flying.append(self._submit(waiting.pop(), choices.randrange(9) if is_aborted else None))
            self._abort(flying)
            self._step(flying)
            for flight in [one for one in flying if len(one.outputs) == len(one.names)]:
                flying.remove(flight)
                answer = self._answer(flight)
                if not flight.aborted:
                    answered(flight.definition, answer)

    def _submit(self, definition: Definition, abort_after: int | None) -> Flight:
        if definition.ask is not None:
            pending = self.engine.submit(definition.ask)
            return Flight(definition, [pending.request_id], pending, None, abort_after)
        assert definition.open is not None
        trace = definition.open()
        names = []
        for prompt, params in zip(trace.prompts, trace.params, strict=True):
            self._number += 1
            names.append(f"trace-{self._number}")
            params.output_kind = RequestOutputKind.FINAL_ONLY
            self.core.add_request(names[-1], prompt, params)
        return Flight(definition, names, None, trace, abort_after)

    def _abort(self, flying: Sequence[Flight]) -> None:
        for flight in flying:
            if flight.steps == flight.abort_after:
                flight.aborted = True
                self.happened.aborted[flight.definition.kind] += 1
                self.core.abort_request([name for name in flight.names if name not in flight.outputs])

    def _step(self, flying: Sequence[Flight]) -> None:
        by_name = {name: flight for flight in flying for name in flight.names}
        preempted = {key: request.num_preemptions for key, request in self.scheduler.requests.items()}
        for output in self.core.step():
            if output.finished and output.request_id in by_name:
                by_name[output.request_id].outputs[output.request_id] = output
        self.happened.num_steps += 1
        assert self.happened.num_steps < _MAX_STEPS, "the engine does not come to an end"
        for flight in flying:
            flight.steps += 1
            if flight.aborted:
                for name in flight.names:
                    flight.outputs.setdefault(name, None)  # nothing comes of it
        for key, request in self.scheduler.requests.items():
            kind = self._kind_of(request)
            self.happened.preempted[kind] += request.num_preemptions - preempted.get(key, 0)
            if 0 < request.num_computed_tokens < request.num_prompt_tokens and key not in self._seen_chunked:
                self._seen_chunked.add(key)
                self.happened.chunked[kind] += 1

    def _kind_of(self, request: Any) -> str:
        extra = request.sampling_params.extra_args or {}
        if not extra:
            return PLAIN
        return TRACED if any("trace" in key for key in extra) else DECLARATIVE

    def _answer(self, flight: Flight) -> Answer:
        outputs = [output for name in flight.names if (output := flight.outputs[name]) is not None]
        if flight.trace is not None:
            return self._traced_answer(flight, flight.trace, outputs)
        assert flight.pending is not None
        if flight.aborted:
            self.engine.router.close(flight.pending.request_id)
            return Answer(None, None, 0.0)
        (reply,) = self.engine.replies(flight.pending, outputs[0])
        assert reply.failure is None, reply.failure
        results: list[Any] = [] if reply.collected is None else list(reply.collected.results)
        values = [
            reply.token_ids,
            *(reply.tensor(one.name, point) for one in results for point in one.points),
        ]
        return Answer(values, None, _gap(outputs))

    def _traced_answer(self, flight: Flight, trace: SentTrace, outputs: list[RequestOutput]) -> Answer:
        results = results_of(dict(enumerate(outputs)))
        data = self.model.engine.collective_rpc("collect_trace", args=(trace.key, results))[0]
        if flight.aborted:
            return Answer(None, None, 0.0)
        outcomes = trace.read(data, outputs)
        tokens = [list(choice.token_ids) for output in outputs for choice in output.outputs]
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        values = [tokens, [_plain(outcome.saves) for outcome in outcomes if outcome.error is None]]
        error = (type(errors[0]), str(errors[0])) if errors else None
        return Answer(values, error, _gap(outputs))


def _plain(saves: dict[str, Any]) -> dict[str, Any]:
    """Put tokens in the place of vLLM's outputs."""
    return {
        name: [list(choice.token_ids) for choice in value.outputs]
        if isinstance(value, RequestOutput)
        else value
        for name, value in saves.items()
    }


def _gap(outputs: Sequence[RequestOutput]) -> float:
    gaps = [float("inf")]
    for output in outputs:
        for choice in output.outputs:
            for step in choice.logprobs or []:
                best, second, *_ = sorted((entry.logprob for entry in step.values()), reverse=True)
                gaps.append(best - second)
    return min(gaps)


def difference(wanted: Any, got: Any, tolerance: float) -> str:
    """Say where two trees differ, or return an empty text."""
    if isinstance(wanted, torch.Tensor):
        if wanted.shape != got.shape:
            return f"of shape {tuple(wanted.shape)} and {tuple(got.shape)}"
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        apart = float((wanted.double() - got.double()).abs().max()) / scale if wanted.numel() else 0.0
        return "" if apart <= tolerance else f"apart by {apart:.2g}"
    if isinstance(wanted, dict):
        if wanted.keys() != got.keys():
            return f"names {sorted(wanted)} and {sorted(got)}"
        pairs = [(name, wanted[name], got[name]) for name in wanted]
    elif isinstance(wanted, list | tuple):
        if len(wanted) != len(got):
            return f"{len(wanted)} and {len(got)} items"
        pairs = [(str(at), one, other) for at, (one, other) in enumerate(zip(wanted, got, strict=True))]
    else:
        return "" if wanted == got else f"{wanted!r} and {got!r}"
    return next(
        (f"{name}: {how}" for name, one, other in pairs if (how := difference(one, other, tolerance))), ""
    )
