"""Plans without vLLM: the cost of a step's interventions on a stand-in for a model, on any device.

The stand-in is a residual stream with one multiplication per layer, whose rows are requests that decode. A
plan is built, run and harvested at each step as the worker does it, and its results are put where the
scheduler keeps them. Before anything is timed, a steady step must apply the operations, must report all
requests together, and must not wait for the device before its results are taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from api_schemas.interventions import parse_interventions
from benchmarks.case import BenchmarkCase, Sampler, difference, ratio
from benchmarks.host_waits import finding_waits
from benchmarks.interventions import ContentOf, LayerSizes, captured, every, first_only, middle, steered
from benchmarks.turns import CallsByTurns
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.families.registry import ENGINE_FAMILIES
from nnsight_engine.plans.collect.outbox import Outbox
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.records import StepResults
from nnsight_engine.plans.request_plan import RequestPlan
from nnsight_engine.plans.step.plan import StepPlan
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.module_tree import ModelLayout
from nnsight_engine.vllm_backend.steps.worker_state import Step, WorkerState

_SHAPE: Final = LayerSizes(num_layers=30, hidden_size=576)
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
_POINTS: Final = ModelPoints(
    model=nn.Identity(),
    layout=ModelLayout(ENGINE_FAMILIES[0], ()),
    layers=(),
    local_layers=range(0),
    final_norm=None,
    project_out=None,
    hidden_size=_SHAPE.hidden_size,
    vocab_size=_SPEC.vocab_size,
    tensor_parallel_size=1,
)
_OPERATIONS: Final[dict[str, ContentOf]] = {
    "one request steered": first_only(steered(middle)),
    "every request its own vector, one layer": steered(middle),
    "every request its own vector, all layers": steered(every),
    "last token captured, all layers": captured(every, "generated", "last"),
}


class PlanCheckError(Exception):
    """A plan did not do what its operations say, or would have waited for the device."""


def _decode_step(
    request_ids: Sequence[str], position: int, known_ids: npt.NDArray[np.int32], token_ids: torch.Tensor
) -> Step:
    """Return a step in which each request has one row, at the same position."""
    num_rows = len(request_ids)
    return Step(
        request_ids,
        np.full(num_rows, position, np.int32),
        np.ones(num_rows, np.int32),
        num_padded_rows=num_rows,
        token_ids=token_ids,
        known_ids=dict.fromkeys(request_ids, known_ids),
        prefill_lens=np.zeros(num_rows, np.int32),
        is_repeatable=True,
    )


class _StandIn:
    """Requests that decode on the stand-in, step by step."""

    def __init__(self, content_of: ContentOf, num_requests: int, device: torch.device) -> None:
        generator, width = torch.Generator().manual_seed(0), _SHAPE.hidden_size
        weights = torch.randn((_SHAPE.num_layers, width, width), generator=generator) / width
        self._weights = weights.to(device, torch.bfloat16)
        self._start = torch.randn(num_requests, width, generator=generator).to(device, torch.bfloat16)
        self._state = WorkerState(
            _POINTS,
            _SPEC,
            device,
            max_request_bytes=_MANY_BYTES,
            max_engine_bytes=_MANY_BYTES,
        )
        self._outbox = Outbox()
        self._request_ids = [str(index) for index in range(num_requests)]
        self._plans: dict[str, RequestPlan] = {}
        for index, request_id in enumerate(self._request_ids):
            interventions: Any = content_of(index, _SHAPE)
            if not interventions:
                continue
            compiled = compile_request(
                parse_interventions(interventions),
                spec=_SPEC,
                prompt_token_ids=_PROMPT,
                max_tokens=_MANY_TOKENS - len(_PROMPT),
                token_of=len,
                stream=False,
            )
            tensors = {name: (one.dtype, list(one.shape), one.data) for name, one in compiled.tensors.items()}
            self._plans[request_id] = compiled.plan
            self._state.begin_step([(request_id, {"plan": compiled.plan, "tensors": tensors})], set())
            self._outbox.open(request_id, compiled.plan, stops_outside=False)
        self._position = len(_PROMPT)
        self._known_ids = np.zeros(_MANY_TOKENS, np.int32)
        self._token_ids = torch.zeros(num_requests, dtype=torch.int32, device=device)
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
        """Run steps that must apply the operations; the last, a steady one, must not wait for the device."""
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
        for row, request_id in enumerate(self._request_ids):
            found = self._plans.get(request_id)
            writes = found is not None and any(not op.reads for op in found.ops)
            if torch.equal(plain[-1, row], outputs[-1, row]) is writes:
                raise PlanCheckError(f"row {row} must {'' if writes else 'not '}be changed by its plan")
            if found is not None and not writes:
                payload = self._outbox.take_payload(request_id, final=True)
                expected = outputs[:, row].contiguous().cpu().view(torch.int16).numpy().tobytes()
                if payload is None or payload.records[0].parts[0] != expected:
                    raise PlanCheckError(f"the capture of row {row} must be the layers' outputs")

    def _plan(self) -> StepPlan | None:
        self._position += 1
        self._state.begin_step([], set())
        step = _decode_step(self._request_ids, self._position, self._known_ids, self._token_ids)
        return self._state.plan(step)

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
        delivery = self._state.leave(plan)
        results = None if delivery is None else delivery.results([], {})
        if results is None or results.failures:
            raise PlanCheckError(f"a plan failed: {None if results is None else results.failures}")
        self._outbox.absorb(results)
        return results


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raise where the block would wait for the device: torch's RuntimeError on CUDA, ours elsewhere."""
    if device.type != "cuda":
        with finding_waits(_refuse):
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _refuse(wait: str) -> None:
    raise PlanCheckError(wait)


def plan_cases(device: torch.device, batches: tuple[int, ...]) -> list[BenchmarkCase]:
    """Return every case; its preparation checks it."""

    def make(content_of: ContentOf, batch: int) -> Sampler:
        steps = _StandIn(content_of, batch, device)
        steps.check()
        return CallsByTurns({"ours": steps.planned, "plain": steps.plain}, repetition_s=0.1)

    measures = (difference("ours", "plain"), ratio("ours", "plain"))
    return [
        BenchmarkCase(name, f"batch {batch}", partial(make, content_of, batch), measures)
        for name, content_of in _OPERATIONS.items()
        for batch in batches
    ]
