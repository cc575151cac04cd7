"""Plays a case on an engine, step by step, and gathers what each choice answers, whole or in parts."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind

from api_schemas.errors import ApiError
from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.collect.collector import OperationResult, RequestCollector
from nnsight_engine.plans.collect.results import (
    CollectedCapture,
    CollectedFeatures,
    CollectedLens,
    CollectedMarks,
    CollectedProbe,
    CollectedResults,
    CollectedScores,
    CollectedTrace,
    TensorResult,
)
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import SentTrace
from tests.e2e.fuzz.cases import AFTER_ALL
from tests.e2e.fuzz.judge import Choice, PromptLogprobs
from tests.e2e.fuzz.traced import sent_trace, traced_results
from tests.e2e.fuzz.vectors import sent
from tests.e2e.fuzz.world import Json
from tests.e2e.harness import Ask, Engine, Pending

_MAX_STEPS: Final = 20_000
Result = OperationResult
One = TypeVar("One")


@dataclasses.dataclass(slots=True)
class Answer:
    """What came of a request.

    Attributes:
        choices: Its choices, empty where it was refused, failed or left.
        error: The code and the message where it was refused or failed.
        recomputed: Positions that preemption had computed again.
        cached: Prompt tokens from the prefix cache.
        drafted: Rows computed for drafts.
        refused: Those of them that do not count.
        was_split: Whether a step computed a part only of its tokens.
    """

    choices: list[Choice] = dataclasses.field(default_factory=list)
    error: tuple[str, str] | None = None
    recomputed: int = 0
    cached: int = 0
    drafted: int = 0
    refused: int = 0
    was_split: bool = False


@dataclasses.dataclass(slots=True)
class _Gathered:
    """A choice while it comes."""

    collector: RequestCollector | None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    parts: list[CollectedResults] = dataclasses.field(default_factory=list)
    failure: InterventionError | None = None

    def take(self, output: Any) -> None:
        self.token_ids += output.token_ids
        self.logprobs += [{t: e.logprob for t, e in step.items()} for step in output.logprobs or []]
        if self.collector is None or self.collector.failure is not None or self.failure is not None:
            return
        try:
            part = (
                self.collector.take_final(self.token_ids)
                if output.finish_reason is not None
                else self.collector.take_part(len(self.token_ids))
            )
        except InterventionError as error:
            self.failure = error
            return
        self.parts += [] if part is None else [part]

    def choice(self) -> Choice:
        has_failed_at_once = self.failure is not None and not self.parts
        collected = None if self.collector is None or has_failed_at_once else _joined(self.parts)
        return Choice(self.token_ids, self.logprobs, collected, failure=self.failure)


@dataclasses.dataclass(slots=True)
class _Live:
    index: int
    pending: Pending
    gathered: list[_Gathered]
    leaves_at: int | None = None
    trace: SentTrace | None = None
    prompt_logprobs: list[PromptLogprobs] = dataclasses.field(default_factory=list)

    def take(self, output: Any) -> None:
        for choice in output.outputs:
            self.gathered[choice.index].take(choice)
        if output.prompt_logprobs:
            # In a stream once for each choice.
            steps = [step or {} for step in output.prompt_logprobs]
            self.prompt_logprobs.append([{t: e.logprob for t, e in step.items()} for step in steps])

    def choices(self) -> list[Choice]:
        first, *others = [gathered.choice() for gathered in self.gathered]
        return [dataclasses.replace(first, prompt_logprobs=self.prompt_logprobs), *others]


class Player:
    """Plays one case on a model, whose engine takes operations."""

    def __init__(self, model: VLLM, engine: Engine, requests: list[Json]) -> None:
        self._model, self._engine, self._requests = model, engine, requests
        self._answers = [Answer() for _ in requests]
        self._live: dict[str, _Live] = {}
        self._step = 0
        self._split: set[str] = set()

    def play(self) -> list[Answer]:
        """Return the answer of each request, in order; the engine is empty afterwards."""
        assert self._engine.llm.reset_prefix_cache()
        with split_requests(self._engine) as self._split:
            self._play()
        return self._answers

    def _play(self) -> None:
        waiting = sorted(range(len(self._requests)), key=lambda index: self._requests[index]["arrives"])
        try:
            while waiting or self._live:
                if not self._live:
                    self._step = max(self._step, self._requests[waiting[0]]["arrives"])
                while waiting and self._requests[waiting[0]]["arrives"] <= self._step:
                    self._arrive(waiting.pop(0))
                self._leave()
                for output in self._engine.core.step():
                    self._take(output)
                self._step += 1
                assert self._step % AFTER_ALL < _MAX_STEPS, "the case does not end"
        finally:
            self._end(list(self._live.values()))

    def _arrive(self, index: int) -> None:
        request = self._requests[index]
        if request.get("trace"):
            self._live[f"trace-{index}"] = self._open(index, request)
            return
        ask = Ask(
            request["ids"],
            [sent(op) for op in request["interventions"]],
            request["max_tokens"],
            request["sampling"],
            stream=request.get("stream", False),
            cache_salt=request.get("cache_salt"),
        )
        try:
            pending = self._engine.submit(ask)
        except ApiError as error:
            self._answers[index].error = (str(error.code.value), error.message)
            return
        count = request["sampling"].get("n", 1)
        collectors: list[RequestCollector | None] = [*pending.collectors] or [None] * count
        leaves = request.get("leaves")
        leaves_at = None if leaves is None else self._step + leaves
        gathered = [_Gathered(collector) for collector in collectors]
        self._live[pending.request_id] = _Live(index, pending, gathered, leaves_at)

    def _open(self, index: int, request: Json) -> _Live:
        trace = sent_trace(self._model, request)
        (params,) = trace.params
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self._engine.core.add_request(f"trace-{index}", trace.prompts[0], params)
        return _Live(index, Pending(f"trace-{index}", []), [_Gathered(None)], trace=trace)

    def _leave(self) -> None:
        self._end([live for live in self._live.values() if live.leaves_at == self._step])

    def _end(self, lives: list[_Live]) -> None:
        self._engine.core.abort_request([live.pending.request_id for live in lives])
        for live in lives:
            self._engine.router.close(live.pending.request_id)
            del self._live[live.pending.request_id]

    def _take(self, output: Any) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        live.take(output)
        if not output.finished:
            return
        del self._live[output.request_id]
        self._engine.router.close(output.request_id)
        answer = self._answers[live.index]
        answer.cached = output.num_cached_tokens or 0
        # Within the engine it has something after its id, and choices something before.
        answer.was_split = any(f"{output.request_id}-" in one for one in self._split)
        failures = [g.collector.failure for g in live.gathered if g.collector and g.collector.failure]
        if failures:
            answer.error = (failures[0].code, failures[0].message)
            return
        answer.choices = live.choices()
        if live.trace is not None:
            self._take_trace(live.trace, self._requests[live.index], answer, output)
        collected = [choice.collected for choice in answer.choices if choice.collected]
        answer.recomputed = sum(one.recomputed_tokens for one in collected)
        answer.drafted = sum(one.drafted_rows for one in collected)
        answer.refused = sum(one.refused_rows for one in collected)

    def _take_trace(self, trace: SentTrace, request: Json, answer: Answer, output: Any) -> None:
        results = traced_results(self._model, trace, request, output)
        if isinstance(results, ChunkedPromptError):
            answer.choices, answer.error = [], ("chunked_trace", str(results))
        else:
            answer.choices = [dataclasses.replace(answer.choices[0], collected=results)]


@contextlib.contextmanager
def split_requests(engine: Engine) -> Iterator[set[str]]:
    """Gather the engine's ids of requests of which a step computes a part only of the known tokens."""
    scheduler = engine.core.engine_core.engine_core.scheduler
    schedule, found = scheduler.schedule, set[str]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        requests = [scheduler.requests[request_id] for request_id in step.num_scheduled_tokens]
        found.update(one.request_id for one in requests if one.num_computed_tokens < one.num_tokens)
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "schedule", watched)
        yield found


def _joined(parts: list[CollectedResults]) -> CollectedResults:
    """Return the parts of a stream as one; the last one says where everything applied."""
    results: dict[str, Result] = {}
    for part in parts:
        for result in part.results:
            assert not isinstance(result, CollectedTrace)
            _check_widths(result)
            known = results.get(result.name)
            results[result.name] = result if known is None else _appended(known, result)
    return dataclasses.replace(parts[-1], results=list(results.values()))


def _appended(first: Result, more: Result) -> Result:
    positions = [*first.positions, *more.positions]
    match first, more:
        case CollectedCapture(), CollectedCapture():
            points = {name: _longer(tensor, more.points[name]) for name, tensor in first.points.items()}
            return dataclasses.replace(first, positions=positions, points=points)
        case CollectedProbe(), CollectedProbe():
            numbers = {name: np.append(values, more.points[name]) for name, values in first.points.items()}
            return dataclasses.replace(first, positions=positions, points=numbers)
        case CollectedLens(), CollectedLens():
            names = ("ids", "logprobs", "target_logprobs", "ranks")
            layers = {
                layer: _stacked(rows, more.layers[layer], *names) for layer, rows in first.layers.items()
            }
            return dataclasses.replace(first, positions=positions, layers=layers)
        case CollectedScores(), CollectedScores():
            return _stacked(dataclasses.replace(first, positions=positions), more, "scores")
        case CollectedFeatures(), CollectedFeatures():
            return _stacked(dataclasses.replace(first, positions=positions), more, "ids", "activations")
        case CollectedMarks(), CollectedMarks():
            return dataclasses.replace(first, positions=positions)
        case _:
            raise AssertionError(f"{first.name} changes its kind")


def _stacked(first: One, more: Any, *names: str) -> One:
    """Return a result whose arrays of these names continue with another's."""
    arrays = {name: np.concatenate((getattr(first, name), getattr(more, name))) for name in names}
    return dataclasses.replace(first, **arrays)  # type: ignore[type-var]


def _check_widths(result: Result) -> None:
    """Patterns of a part must be as wide as the part's own last position."""
    if isinstance(result, CollectedCapture) and result.positions:
        widths = {tensor.shape[-1] for name, tensor in result.points.items() if name.endswith("attn.pattern")}
        assert widths <= {result.positions[-1] + 1}, f"{result.name} has {widths} keys at {result.positions}"


def _longer(first: TensorResult, more: TensorResult) -> TensorResult:
    width = max(first.shape[-1], more.shape[-1])
    shape = (first.shape[0] + more.shape[0], *first.shape[1:-1], width)
    return TensorResult(first.dtype, shape, _widened(first, width) + _widened(more, width))


def _widened(tensor: TensorResult, width: int) -> bytes:
    """Return the bytes of a tensor whose rows are filled up with zeros, as patterns of one tensor are."""
    if tensor.shape[-1] == width:
        return tensor.data
    num_rows = math.prod(tensor.shape[:-1])
    row = len(tensor.data) // num_rows if num_rows else 0
    more = bytes((width - tensor.shape[-1]) * ITEM_BYTES[tensor.dtype])
    return b"".join(tensor.data[start * row : (start + 1) * row] + more for start in range(num_rows))
