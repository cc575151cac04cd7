"""Plans without vLLM: what a step's interventions cost on a stand-in for a model, on any device.

The stand-in is a residual stream with one multiplication per layer, whose rows are requests that decode. A
plan is built, run and harvested at each step as the worker does it. Before anything is timed, a steady step
must apply what was asked for, and must not wait for the device before its results are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from api_schemas.interventions import parse_interventions
from benchmarks.asked import ForRequest, Shape, captured, every, first_only, middle, steered
from benchmarks.tracing.timing import CallsByTurns, Case, Sampler, microseconds_over, ratio
from benchmarks.waiting import no_waiting
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.plans.active import ActiveRequest, Registrar
from nnsight_engine.plans.builder import StepBuilder
from nnsight_engine.plans.compile import compile_request
from nnsight_engine.plans.harvest import Harvester
from nnsight_engine.plans.ledger import ByteLedger
from nnsight_engine.plans.patterns import AttentionForm
from nnsight_engine.plans.records import StepResults
from nnsight_engine.plans.step_plan import Span, StepPlan

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

_ASKED: Final[dict[str, ForRequest]] = {
    "one request steered": first_only(steered(middle)),
    "every request its own vector, one layer": steered(middle),
    "every request its own vector, all layers": steered(every),
    "last token captured, all layers": captured(every, "generated", "last"),
}


class PlanCheckError(Exception):
    """A plan did not do what was asked for."""


class Decoding:
    """Requests that decode on the stand-in, step by step.

    Args:
        asks: What each request asks for.
        num_requests: How many run together.
        device: Where.
    """

    def __init__(self, asks: ForRequest, num_requests: int, device: torch.device) -> None:
        """Make the stand-in, and register the requests."""
        generator = torch.Generator().manual_seed(0)
        size, width = (_SHAPE.num_layers, _SHAPE.hidden_size, _SHAPE.hidden_size), _SHAPE.hidden_size
        self._weights = (torch.randn(size, generator=generator) / width).to(device, torch.bfloat16)
        self._start = torch.randn(num_requests, width, generator=generator).to(device, torch.bfloat16)
        ledger = ByteLedger(max_request_bytes=_MANY_BYTES, max_engine_bytes=_MANY_BYTES)
        self._registrar = Registrar(_SPEC, torch.bfloat16, device)
        self._builder = StepBuilder(_SPEC, torch.bfloat16, device, ledger, _no_pattern)
        self._harvester = Harvester(lambda _rows: None)
        self._requests = [self._registered(index, asks) for index in range(num_requests)]
        self._position = len(_PROMPT)
        self._token_ids = np.zeros(_MANY_TOKENS, np.int32)
        self._device = device

    def _registered(self, index: int, asks: ForRequest) -> ActiveRequest | None:
        asked = asks(index, _SHAPE)
        if not asked or not isinstance(asked, list):
            return None
        compiled = compile_request(
            parse_interventions(asked),
            spec=_SPEC,
            prompt_token_ids=_PROMPT,
            max_tokens=_MANY_TOKENS - len(_PROMPT),
            tokenize=lambda _text: [],
            stream=False,
        )
        tensors = {
            name: (content.dtype, list(content.shape), content.data)
            for name, content in compiled.tensors.items()
        }
        return self._registrar.register(str(index), compiled.plan.encode(), tensors)

    def plain(self) -> torch.Tensor:
        """Run a step of the stand-in alone; returns all layers' outputs, ``[layers, requests, width]``."""
        return self._forward(lambda _layer, _hidden: None)

    def planned(self) -> StepResults:
        """Run a step with its plan, and take the results."""
        plan = self._plan()
        self._forward(lambda layer, hidden: plan.run(layer + 1, hidden, None))
        return self._taken(plan)

    def check(self) -> None:
        """Run steps that must do what was asked for; the last, a steady one, without waiting for the device.

        Raises:
            PlanCheckError: They did not.
        """
        self.planned()
        plain = self.plain()
        # The way there is warmed up, as libraries may wait when they are first used.
        for guard in (no_waiting(torch.device("meta")), no_waiting(self._device)):
            with guard:
                plan = self._plan()
                outputs = self._forward(lambda layer, hidden, plan=plan: plan.run(layer + 1, hidden, None))  # type: ignore[misc] # bound now
            results = self._taken(plan)
        self._check_rows(plain, outputs)
        self._check_captured(outputs, results)

    def _check_rows(self, plain: torch.Tensor, outputs: torch.Tensor) -> None:
        for row, request in enumerate(self._requests):
            writes = request is not None and any(not active.op.reads for active in request.ops)
            if torch.equal(plain[-1, row], outputs[-1, row]) is writes:
                raise PlanCheckError(f"row {row} must {'' if writes else 'not '}be changed by its plan")

    def _check_captured(self, outputs: torch.Tensor, results: StepResults) -> None:
        for row, request in enumerate(self._requests):
            if request is None or not request.ops[0].op.reads:
                continue
            expected = outputs[:, row].contiguous().cpu().view(torch.int16).numpy().tobytes()
            if results.records[str(row)][0].parts[0] != expected:
                raise PlanCheckError(f"what row {row} captured must be what the layers returned")

    def _plan(self) -> StepPlan:
        self._position += 1
        spans = [
            Span(request, row, 1, self._position, self._token_ids)
            for row, request in enumerate(self._requests)
            if request is not None
        ]
        return self._builder.plan(spans)

    def _forward(self, at_layer: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
        hidden, outputs = self._start, []
        for layer, weight in enumerate(self._weights):
            hidden = torch.addmm(hidden, hidden, weight)
            at_layer(layer, hidden)
            outputs.append(hidden)
        return torch.stack(outputs)

    def _taken(self, plan: StepPlan) -> StepResults:
        plan.fail_unreached()
        self._builder.give_back(plan)
        results = self._harvester.harvest(plan, [], {})
        for failure in results.failures.values():
            raise PlanCheckError(f"a plan failed: {failure.message}")
        return results


def plan_cases(device: torch.device, batches: tuple[int, ...]) -> list[Case]:
    """Return every case, whose making checks it."""

    def maker(asks: ForRequest, batch: int) -> Callable[[], Sampler]:
        def make() -> Sampler:
            decoding = Decoding(asks, batch, device)
            decoding.check()
            return CallsByTurns({"ours": decoding.planned, "plain": decoding.plain}, repetition_s=0.1)

        return make

    measures = (microseconds_over("ours", "plain"), ratio("ours", "plain"))
    return [
        Case(name, f"batch {batch}, {device.type}", maker(asks, batch), measures)
        for name, asks in _ASKED.items()
        for batch in batches
    ]


def _no_pattern(_layer: int) -> AttentionForm:
    raise PlanCheckError("no plan here reads attention patterns")
