"""Faults put into the engine on purpose, each of which the cases must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.plans import where
from nnsight_engine.plans.collect import assembly
from nnsight_engine.plans.step import builder, operation_rows, reads, writes
from nnsight_engine.plans.step.answer_tracker import AnswerTracker
from nnsight_engine.plans.step.lens import LensReader
from nnsight_engine.vllm_backend import call
from tests.e2e import harness

Patch = pytest.MonkeyPatch


def _skip_a_row(patch: Patch) -> None:
    """A write leaves out its last row."""

    def run(self: writes.Add, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        hidden.index_add_(0, self.rows[:-1], self.delta[:-1])

    patch.setattr(writes.Add, "run", run)


def _wrong_scale(patch: Patch) -> None:
    """A write is a tenth too strong."""
    right = writes.NormMatch.run

    def run(self: writes.NormMatch, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        right(dataclasses.replace(self, direction=self.direction * 1.1), hidden, residual)

    patch.setattr(writes.NormMatch, "run", run)


def _dimension_left(patch: Patch) -> None:
    """Of a subspace a direction is left."""
    right = writes.Subspace.run

    def run(self: writes.Subspace, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        bases = [(num_rows, basis[..., 1:, :]) for num_rows, basis in self.bases]
        right(dataclasses.replace(self, bases=bases), hidden, residual)

    patch.setattr(writes.Subspace, "run", run)


def _keep_the_residual(patch: Patch) -> None:
    """What replaces a value leaves the other tensor's part in."""
    right = writes.Set.run

    def run(self: writes.Set, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        right(self, hidden, None)

    patch.setattr(writes.Set, "run", run)


def _read_off_by_one(patch: Patch) -> None:
    """A read takes the row before."""
    right = reads.GatherKernel.run

    def run(self: reads.GatherKernel, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        rows = (self.rows - 1).clamp(min=0)
        right(dataclasses.replace(self, rows=rows, span=None), hidden, residual)

    patch.setattr(reads.GatherKernel, "run", run)


def _read_in_place(patch: Patch) -> None:
    """A read adds the residual into the model's own memory."""
    right = reads.GatherKernel.run

    def run(self: reads.GatherKernel, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        right(self, hidden, residual)
        if residual is not None:
            hidden.index_add_(0, self.rows, residual.index_select(0, self.rows))

    patch.setattr(reads.GatherKernel, "run", run)


def _late_phase(patch: Patch) -> None:
    """The prompt's last position counts as generated."""
    right = where.evaluate

    def evaluate(rule: Any, positions: Any, token_ids: Any, prompt_len: int, parts: Any) -> Any:
        return right(rule, positions, token_ids, prompt_len - 1, parts)

    patch.setattr(operation_rows, "evaluate", evaluate)


def _parts_begin_anew(patch: Patch) -> None:
    """A step does not know the part of the answer in which the step before ended."""

    def part_at(self: AnswerTracker, _position: int, _token_ids: Any) -> int:
        return self._answer.first

    patch.setattr(AnswerTracker, "_part_at", part_at)


def _no_salt(patch: Patch) -> None:
    """Requests that write share the prefix cache with all others."""
    patch.setattr(harness, "salted", lambda *_args: None)


def _clients_share_a_salt(patch: Patch) -> None:
    """Requests that write alike share the cache, whatever their own salt."""
    right = call.salted
    patch.setattr(harness, "salted", lambda compiled, _salt, secret: right(compiled, None, secret))


def _narrow_patterns(patch: Patch) -> None:
    """A part's patterns lack what its last position attends to itself."""
    right = assembly.captured_patterns

    def captured(op: Any, records: Any, **options: Any) -> Any:
        points = right(op, records, **options)
        for point, result in points.items():
            values = np.frombuffer(result.data, f"u{ITEM_BYTES[result.dtype]}").copy().reshape(result.shape)
            values[..., -1:] = 0
            points[point] = dataclasses.replace(result, data=values.tobytes())
        return points

    patch.setattr(assembly, "captured_patterns", captured)


def _prompt_logprobs_of_the_row_before(patch: Patch) -> None:
    """The log-probabilities of a prompt's token are computed one position too early."""
    right = PromptLogprobsWorker.compute_prompt_logprobs

    def prompt_logprobs(
        self: Any, compute: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        return right(self, compute, hidden_states.roll(1, 0), *args, **kwargs)

    patch.setattr(PromptLogprobsWorker, "compute_prompt_logprobs", prompt_logprobs)


def _readers_use_the_cache(patch: Patch) -> None:
    """Prompts whose rows are read may come from the cache."""
    right = call.prepare_params

    def prepare(params: Any, compiled: Any, key: str) -> None:
        right(params, msgspec.structs.replace(compiled, reads_prompt=False), key)

    patch.setattr(harness, "prepare_params", prepare)


def _delivered_again(patch: Patch) -> None:
    """What is computed again after a preemption is read again."""
    right = operation_rows.named_offsets

    def named(span: Any, active: Any, parts: Any) -> Any:
        end, span.request.end_position = span.request.end_position, 0
        try:
            return right(span, active, parts)
        finally:
            span.request.end_position = end

    patch.setattr(builder, "named_offsets", named)


def _other_logprobs(patch: Patch) -> None:
    """What a lens shows first is off by a nat."""
    right = LensReader.read

    def read(self: LensReader, *args: Any) -> list[torch.Tensor]:
        ids, top, targets, ranks = right(self, *args)
        return [ids, top + 1.0, targets, ranks]

    patch.setattr(LensReader, "read", read)


def _wrong_probe(patch: Patch) -> None:
    """A probe leaves out its bias."""
    right = reads.ProbeKernel.run

    def run(self: reads.ProbeKernel, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        right(dataclasses.replace(self, bias=torch.zeros_like(self.bias)), hidden, residual)

    patch.setattr(reads.ProbeKernel, "run", run)


Mutant = Callable[[Patch], None]

MUTANTS: Final[tuple[Mutant, ...]] = (
    _skip_a_row,
    _wrong_scale,
    _dimension_left,
    _keep_the_residual,
    _read_off_by_one,
    _read_in_place,
    _late_phase,
    _parts_begin_anew,
    _no_salt,
    _clients_share_a_salt,
    _narrow_patterns,
    _prompt_logprobs_of_the_row_before,
    _readers_use_the_cache,
    _delivered_again,
    _other_logprobs,
    _wrong_probe,
)
