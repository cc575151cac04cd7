"""Plans without vLLM: what a step's interventions cost on a stand-in for a model, on any device.

The stand-in is a residual stream with one multiplication per layer, whose rows are requests that decode. A
plan is built, run and harvested at each step as the worker does it, and its results are put where the
scheduler keeps them. Before anything is timed, a steady step must apply the operations, must report all
requests together, and must not wait for the device before its results are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from api_schemas.interventions import parse_interventions
from benchmarks.case import Case, Sampler, difference, ratio
from benchmarks.interventions import (
    Content,
    OperationsOf,
    Shape,
    captured,
    every,
    first_only,
    middle,
    steered,
)
from benchmarks.turns import CallsByTurns
from benchmarks.waiting import no_waiting
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.plans.collect.outbox import Outbox
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.records import StepResults
from nnsight_engine.plans.request_plan import CompiledRequest
from nnsight_engine.plans.step.plan import StepPlan
from nnsight_engine.vllm_backend.families import FAMILIES, ModelPoints
from nnsight_engine.vllm_backend.worker_state import WorkerState

_SHAPE: Final = Shape(num_layers=30, hidden_size=576)
_PROMPT: Final = (1, 2, 3, 4)
_MANY_TOKENS: Final = 1_000_000
_MANY_BYTES: Final = 1 << 30
_SPEC: Final = ModelSpec(
    name="stand-in",
    architecture="",
    num_layers=_SHAPE.num_layers,
    hidden_size=_SHAPE.hidden_size,
    vocab_size=1000,
    dtype="bfloat16",
    max_model_len=_MANY_TOKENS,
    max_num_batched_tokens=2048,
    leaves=(LeafSpec("output", (_SHAPE.hidden_size,), "tap", ("steer", "capture")),),
    max_capture_bytes=_MANY_BYTES,
)

_OPERATIONS: Final[dict[str, OperationsOf]] = {
    "one request steered": first_only(steered(middle)),
    "every request its own vector, one layer": steered(middle),
    "every request its own vector, all layers": steered(every),
    "last token captured, all layers": captured(every, "generated", "last"),
}


class PlanCheckError(Exception):
    """A plan did not do what its operations say."""


class Decoding:
    """Requests that decode on the stand-in, step by step."""

    def __init__(self, operations_of: OperationsOf, num_requests: int, device: torch.device) -> None:
        """Make the stand-in, and register the requests."""
        generator = torch.Generator().manual_seed(0)
        size, width = (_SHAPE.num_layers, _SHAPE.hidden_size, _SHAPE.hidden_size), _SHAPE.hidden_size
        self._weights = (torch.randn(size, generator=generator) / width).to(device, torch.bfloat16)
        self._start = torch.randn(num_requests, width, generator=generator).to(device, torch.bfloat16)
        self._state = WorkerState(
            _points(), _SPEC, device, max_request_bytes=_MANY_BYTES, max_engine_bytes=_MANY_BYTES
        )
        self._outbox = Outbox()
        self._request_ids = [str(index) for index in range(num_requests)]
        compiled = {
            request_id: _compiled(operations_of(int(request_id), _SHAPE)) for request_id in self._request_ids
        }
        self._plans = {request_id: request.plan for request_id, request in compiled.items() if request}
        self._state.begin([(key, _entry(request)) for key, request in compiled.items() if request], set())
        for request_id, plan in self._plans.items():
            self._outbox.open(request_id, plan, stops_outside=False)
        self._position = len(_PROMPT)
        self._token_ids = np.zeros(_MANY_TOKENS, np.int32)
        self._device = device

    def plain(self) -> torch.Tensor:
        """Run a step of the stand-in alone; returns all layers' outputs, ``[layers, requests, width]``."""
        return self._forward(lambda _layer, _hidden: None)

    def planned(self) -> StepResults:
        """Run a step with its plan, and take the results."""
        plan = self._plan()
        self._planned_forward(plan)
        return self._take(plan)

    def check(self) -> None:
        """Run steps that must apply the operations; the last, a steady one, without waiting for the device.

        Raises:
            PlanCheckError: They did not.
        """
        self.planned()
        self.planned()
        plain = self.plain()
        # The first pass warms up, as libraries may wait when they are first used.
        for guard in (no_waiting(torch.device("meta")), no_waiting(self._device)):
            with guard:
                plan = self._plan()
                outputs = self._planned_forward(plan)
            results = self._take(plan)
        if results.run_step is None:
            raise PlanCheckError("steps of requests that decode must be reported together")
        self._check_rows(plain, outputs)
        self._check_captured(outputs)

    def _check_rows(self, plain: torch.Tensor, outputs: torch.Tensor) -> None:
        for row, request_id in enumerate(self._request_ids):
            plan = self._plans.get(request_id)
            writes = plan is not None and any(not op.reads for op in plan.ops)
            if torch.equal(plain[-1, row], outputs[-1, row]) is writes:
                raise PlanCheckError(f"row {row} must {'' if writes else 'not '}be changed by its plan")

    def _check_captured(self, outputs: torch.Tensor) -> None:
        for row, request_id in enumerate(self._request_ids):
            plan = self._plans.get(request_id)
            if plan is None or not plan.ops[0].reads:
                continue
            payload = self._outbox.take(request_id, final=True)
            expected = outputs[:, row].contiguous().cpu().view(torch.int16).numpy().tobytes()
            if payload is None or payload.records[0].parts[0] != expected:
                raise PlanCheckError(f"what row {row} captured must be what the layers returned")

    def _plan(self) -> StepPlan | None:
        self._position += 1
        self._state.begin([], set())
        positions = np.full(len(self._request_ids), self._position, np.int32)
        plan = self._state.go_on(self._request_ids, positions)
        if plan is None:
            places = enumerate(self._request_ids)
            spans = [self._state.span(key, row, 1, self._position, self._token_ids) for row, key in places]
            plan = self._state.plan([span for span in spans if span is not None])
            self._state.may_go_on(plan, self._request_ids, positions)
        return plan

    def _planned_forward(self, plan: StepPlan | None) -> torch.Tensor:
        if plan is None:
            raise PlanCheckError("every case here has a request with a plan")
        outputs = self._forward(lambda layer, hidden: plan.run(layer + 1, hidden, None))
        self._state.collect(plan)
        return outputs

    def _forward(self, at_layer: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
        hidden, outputs = self._start, []
        for layer, weight in enumerate(self._weights):
            hidden = torch.addmm(hidden, hidden, weight)
            at_layer(layer, hidden)
            outputs.append(hidden)
        return torch.stack(outputs)

    def _take(self, plan: StepPlan | None) -> StepResults:
        results = self._state.finish(plan, [], {})
        if results is None or results.failures:
            raise PlanCheckError(f"a plan failed: {None if results is None else results.failures}")
        self._outbox.absorb(results)
        return results


def plan_cases(device: torch.device, batches: tuple[int, ...]) -> list[Case]:
    """Return every case, whose making checks it."""

    def maker(operations_of: OperationsOf, batch: int) -> Callable[[], Sampler]:
        def make() -> Sampler:
            decoding = Decoding(operations_of, batch, device)
            decoding.check()
            return CallsByTurns({"ours": decoding.planned, "plain": decoding.plain}, repetition_s=0.1)

        return make

    measures = (difference("ours", "plain"), ratio("ours", "plain"))
    return [
        Case(name, f"batch {batch}", maker(operations_of, batch), measures)
        for name, operations_of in _OPERATIONS.items()
        for batch in batches
    ]


def _compiled(content: Content) -> CompiledRequest | None:
    if not content or not isinstance(content, list):
        return None
    return compile_request(
        parse_interventions(content),
        spec=_SPEC,
        prompt_token_ids=_PROMPT,
        max_tokens=_MANY_TOKENS - len(_PROMPT),
        token_of=len,
        stream=False,
    )


def _entry(request: CompiledRequest) -> dict[str, Any]:
    """Return what the worker gets with a request."""
    tensors = {name: (one.dtype, list(one.shape), one.data) for name, one in request.tensors.items()}
    return {"plan": request.plan, "tensors": tensors}


def _points() -> ModelPoints:
    """Return the points of a model with nothing but a residual stream."""
    return ModelPoints(
        model=nn.Identity(),
        family=FAMILIES[0],
        layers=(),
        local_layers=range(0),
        final_norm=None,
        project_out=None,
        hidden_size=_SHAPE.hidden_size,
        num_heads=1,
        num_kv_heads=1,
        head_dim=_SHAPE.hidden_size,
        intermediate_size=_SHAPE.hidden_size,
        vocab_size=_SPEC.vocab_size,
        tensor_parallel_size=1,
    )
