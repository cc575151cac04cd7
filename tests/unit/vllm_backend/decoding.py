"""A worker and a scheduler without vLLM: plans run on a stand-in for a model, results wait for outputs."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from nnsight_engine.families.dense import LLAMA
from nnsight_engine.plans.collect.outbox import Outbox
from nnsight_engine.plans.records import Payload, StepResults
from nnsight_engine.plans.request_plan import CompiledRequest
from nnsight_engine.plans.step.plan import StepPlan
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.module_tree import ModelLayout
from nnsight_engine.vllm_backend.steps.worker_state import Step, WorkerState
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans import compiling

HIDDEN, VOCAB, LAYERS = 4, 6, 2
SPEC = tiny_spec(num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB, max_model_len=512)
TOKEN_IDS = np.arange(SPEC.max_model_len, dtype=np.int32) % VOCAB
"""The token at each position, of every request."""


class StandIn(nn.Module):
    """Tells a lens and the sampler their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False
        self.weight = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(1))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_broken:
            raise RuntimeError("no logits today")
        return hidden @ self.weight


def compiled(raw: list[dict[str, Any]], prompt_len: int, *, stream: bool = False) -> CompiledRequest:
    return compiling.compiled(*raw, spec=SPEC, prompt=range(prompt_len), max_tokens=64, stream=stream)


@dataclasses.dataclass
class Rows:
    """A request's part of a step; ``seed`` decides what the stand-in computes for it.

    The last ``num_drafts`` rows are drafts.
    """

    request_id: str
    seed: int
    start: int
    num_rows: int
    num_drafts: int = 0


class PlayedStep(Step):
    """A step over given rows; ``shares`` says whether steps may go on with the one before."""

    def __init__(self, batch: Sequence[Rows], *, shares: bool) -> None:
        self._shares = shares
        counts = np.array([rows.num_rows for rows in batch])
        positions = [np.arange(rows.start, rows.start + rows.num_rows) for rows in batch]
        drafts = np.array([rows.num_drafts for rows in batch])
        super().__init__(
            [rows.request_id for rows in batch],
            np.array([rows.start for rows in batch], np.int32),
            counts,
            num_padded_rows=int(counts.sum()),
            token_ids=torch.from_numpy(TOKEN_IDS[np.concatenate(positions)]),
            known_ids=defaultdict(lambda: TOKEN_IDS),
            prefill_lens=np.zeros(len(batch), np.int32),
            is_repeatable=True,
            num_drafts=drafts if drafts.any() else None,
        )

    @property
    def has_one_row_each(self) -> bool:
        return self._shares and super().has_one_row_each


class Worker:
    """A worker's state, fed with steps as the runner feeds it.

    Args:
        shares: Whether steps may go on with the one before; else each is told request by request.
        max_request_bytes: Limit on the captures of a request.
        max_bytes: Limit on those of all.
    """

    def __init__(self, *, shares: bool, max_request_bytes: int = 1 << 20, max_bytes: int = 1 << 20) -> None:
        self.model = StandIn()
        points = ModelPoints(
            model=self.model,
            layout=ModelLayout(LLAMA, ()),
            layers=(),
            local_layers=range(0),
            final_norm=None,
            project_out=None,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            tensor_parallel_size=1,
        )
        self.state = WorkerState(
            points, SPEC, torch.device("cpu"), max_request_bytes=max_request_bytes, max_engine_bytes=max_bytes
        )
        self.outbox = Outbox()
        self.num_shared = 0
        self._shares = shares

    def open(self, request_id: str, request: CompiledRequest, *, stops_outside: bool = False) -> None:
        self.outbox.open(request_id, request.plan, stops_outside=stops_outside)

    def begin(
        self,
        arrived: Mapping[str, CompiledRequest],
        finished: set[str],
        returned: Mapping[str, int] | None = None,
    ) -> None:
        self.state.begin_step(
            [
                (request_id, {"plan": request.plan, "tensors": compiling.tensors_of(request)})
                for request_id, request in arrived.items()
            ],
            finished,
            returned,
        )

    def step(self, batch: Sequence[Rows]) -> PlayedStep:
        return PlayedStep(batch, shares=self._shares)

    def plan(self, batch: Sequence[Rows]) -> StepPlan | None:
        return None if self.state.idle else self.state.plan(self.step(batch))

    def run(self, plan: StepPlan | None, batch: Sequence[Rows], *, skipped_tap: int = -1) -> list[list[int]]:
        """Run the stand-in; returns one sampled id for each request."""
        step, hidden = self.step(batch), hidden_of(batch)
        for tap in range(LAYERS + 1):
            hidden = hidden * 1.25 + tap
            if plan is not None and tap != skipped_tap:
                plan.run(tap, hidden, None)
        if plan is not None:
            self.state.on_hidden(plan, hidden)
        rows = step.logits_rows()
        logits = hidden[rows] @ self.model.weight
        if plan is not None:
            self.state.on_logits(plan, hidden, logits, rows, self.model.compute_logits)
            self.state.collect(plan)
        return [[token] for token in logits[step.logits_ends()].argmax(dim=-1).tolist()]

    def finish(
        self, plan: StepPlan | None, batch: Sequence[Rows], sampled: list[list[int]]
    ) -> StepResults | None:
        delivery = self.state.leave(plan)
        order = {rows.request_id: row for row, rows in enumerate(batch)}
        results = None if delivery is None else delivery.results(sampled, order)
        self.num_shared += results is not None and results.run_step is not None
        num_kept = {rows.request_id: len(ids) for rows, ids in zip(batch, sampled, strict=True)}
        self.outbox.absorb(results, num_kept)
        return results

    def take(self, request_id: str, *, final: bool) -> Payload | None:
        """Return what leaves with a request's output, as it arrives."""
        payload = self.outbox.take_payload(request_id, final=final)
        return None if payload is None else Payload.decode(payload.encode())


def hidden_of(batch: Sequence[Rows]) -> torch.Tensor:
    """Return what the stand-in begins with, a matter of the request and the position alone."""
    rows = []
    for one in batch:
        positions = torch.arange(one.start, one.start + one.num_rows, dtype=torch.float32)
        columns = torch.arange(1, HIDDEN + 1, dtype=torch.float32)
        rows.append(torch.sin(positions[:, None] * columns + one.seed))
    return torch.cat(rows)
