"""A toy model, and an engine that runs the plans of requests on it in random steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import torch

from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.collect.outbox import Outbox
from nnsight_engine.plans.collect.results import CollectedResults
from nnsight_engine.plans.request_plan import CompiledRequest, RequestPlan
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.builder import StepBuilder
from nnsight_engine.plans.step.collection import StepCollection, step_delivery
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.ledger import ByteLedger
from nnsight_engine.plans.step.plan import Span
from nnsight_engine.plans.step.registrar import Registrar
from tests.condition_reference import Array
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import tensors_of

WIDTH, LAYERS = 8, 4
SPEC = tiny_spec(num_layers=LAYERS, hidden_size=WIDTH, vocab_size=50, max_model_len=128)
MIX: Final = np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 2
POINTS: Final = [f"layers.{layer}.output" for layer in range(LAYERS)]


def block(layer: int, x: Array) -> Array:
    return np.asarray(x + np.tanh(x @ MIX[layer]), np.float32)


class Case(Protocol):
    """A request: the tokens of its prompt and its answer, and their embeddings ``[tokens, width]``."""

    prompt_len: int
    tokens: list[int]
    embedded: Array


class PlayedEngine:
    """Runs requests in random chunks, preempts them, and collects their results."""

    def __init__(self, rng: random.Random) -> None:
        context = StepContext(
            SPEC,
            torch.float32,
            torch.device("cpu"),
            ByteLedger(max_request_bytes=1 << 30, max_engine_bytes=1 << 30),
            form_of=lambda _: None,  # type: ignore[arg-type,return-value]
        )
        self.rng = rng
        self.registrar = Registrar(context)
        self.builder = StepBuilder(context)
        self.outbox = Outbox()
        self.collection = StepCollection(lambda _: None, None)
        self.is_regular = rng.random() < 0.5
        self.is_late = rng.random() < 0.5

    def register(self, request_id: str, compiled: CompiledRequest) -> ActiveRequest:
        plan = RequestPlan.decode(compiled.plan.encode())
        tensors = tensors_of(compiled)
        self.outbox.open(request_id, plan, stops_outside=False)
        return self.registrar.register(request_id, plan, tensors)

    def run(self, cases: Mapping[str, Case], active: dict[str, ActiveRequest]) -> dict[str, Array]:
        done = dict.fromkeys(cases, 0)
        known = {name: case.prompt_len for name, case in cases.items()}
        hidden = {name: np.zeros((len(case.tokens), WIDTH), np.float32) for name, case in cases.items()}
        while any(done[name] < len(case.tokens) for name, case in cases.items()):
            spans: list[Span] = []
            rows: list[Array] = []
            tokens: list[int] = []
            row = 0
            for name, case in cases.items():
                if done[name] == len(case.tokens) or (not self.is_regular and self.rng.random() < 0.1):
                    continue
                if done[name] and self.rng.random() < 0.03:
                    done[name] = 0  # preempted
                left = known[name] - done[name]
                num_rows = left if self.rng.random() < 0.5 else self.rng.randint(1, left)
                start = done[name]
                # The host may know the prompt's tokens only, and the device all of the step.
                num_known = case.prompt_len if self.is_late else start + num_rows
                ids = np.asarray(case.tokens[:num_known], np.int32)
                spans.append(Span(active[name], row, num_rows, start, ids, None, 0, len(spans)))
                tokens += case.tokens[start : start + num_rows]
                rows.append(case.embedded[start : start + num_rows])
                row += num_rows
                done[name] += num_rows
                if done[name] == known[name]:
                    known[name] = min(known[name] + 1, len(case.tokens))
            for span in spans:
                span.step_token_ids = torch.tensor(tokens, dtype=torch.int32)
            if spans:
                out = self._step(spans, np.concatenate(rows))
                for span in spans:
                    name = span.request.request_id
                    hidden[name][span.start : span.stop] = out[span.row : span.row + span.num_rows]
        return hidden

    def _step(self, spans: list[Span], x: Array) -> Array:
        plan = self.builder.plan(spans)
        for _ in range(2 if self.rng.random() < 0.2 else 1):  # vLLM may have to run a step again
            value = x
            plan.ran.clear()
            for tap in range(LAYERS + 1):
                value = value if tap == 0 else block(tap - 1, value)
                residual = torch.from_numpy(
                    np.random.default_rng(tap).normal(size=x.shape).astype(np.float32)
                )
                first = torch.from_numpy(value) - residual
                plan.run(tap, first, residual)
                value = (first + residual).numpy()
        plan.fail_unreached()
        self.collection.collect(plan)
        self.outbox.absorb(step_delivery(plan).results([[] for _ in spans], {}))
        self.builder.give_back(plan)
        return value

    def collected(
        self, name: str, compiled: CompiledRequest, case: Case, ops: Sequence[str]
    ) -> CollectedResults:
        """Return the results of a request that has run."""
        collector = RequestCollector(
            compiled.plan,
            SPEC,
            prompt_token_ids=case.tokens[: case.prompt_len],
            op_names=list(ops),
        )
        payload = self.outbox.take(name, final=True)
        assert payload is not None
        collector.add(payload)
        return collector.take_final([*case.tokens[case.prompt_len :], 0])
