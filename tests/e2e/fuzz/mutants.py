"""Faults put into the engine on purpose, each of which the cases must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.plans import where
from nnsight_engine.plans.collect import collector
from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step import builder, operation_rows, registrar, table
from nnsight_engine.plans.step.delivery import LensReader
from nnsight_engine.plans.step.instructions import Code, Execute, Executor, Number, Word
from nnsight_engine.plans.step.table import TableBuilder
from nnsight_engine.plans.step.token_masks import AnswerTracker
from nnsight_engine.vllm_backend import operations_call
from tests.e2e import harness

Patch = pytest.MonkeyPatch
_CLOSED: Final = torch.zeros(1, dtype=torch.bool)


def change_instructions(patch: Patch, change: Callable[[Any, Any, Any], None]) -> None:
    """Have the instructions of each step changed: their rows, words and numbers."""
    right = TableBuilder.segments

    def segments(self: TableBuilder, others: Any, executor: Executor, *args: Any) -> Any:
        def changed(*table: torch.Tensor) -> Execute:
            rows, bounds, words, numbers = (one.numpy() for one in table)
            change(np.repeat(rows, np.diff(bounds)), words, numbers)
            return executor(*table)

        return right(self, others, changed, *args)

    patch.setattr(TableBuilder, "segments", segments)


def _change_execution(patch: Patch, execute: Callable[..., None]) -> None:
    """Have programs executed by a function that gets the right one, their codes and rows, and the value."""
    right = TableBuilder.segments

    def segments(self: TableBuilder, others: Any, executor: Executor, *args: Any) -> Any:
        def changed(*table: torch.Tensor) -> Execute:
            own = executor(*table)
            rows, bounds, words, _ = (one.numpy() for one in table)

            def run(first: int, stop: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
                codes = set(words[bounds[first] : bounds[stop], Word.CODE].tolist())
                execute(partial(own, first, stop), codes, rows[first:stop], hidden, residual)

            return run

        return right(self, others, changed, *args)

    patch.setattr(TableBuilder, "segments", segments)


def leave_out(words: Any, which: Any) -> None:
    """Leave out some instructions."""
    words[which, Word.GATE] = _CLOSED.data_ptr()


def _skip_a_row(patch: Patch) -> None:
    """A write leaves out its last row."""

    def change(rows: Any, words: Any, _numbers: Any) -> None:
        adds = words[:, Word.CODE] == Code.ADD
        if adds.any():
            leave_out(words, adds & (rows == rows[adds].max()))

    change_instructions(patch, change)


def _wrong_scale(patch: Patch) -> None:
    """A write is a tenth too strong."""
    right, held = table.own_program, list[torch.Tensor]()

    def own_program(op: Any, tensor: Any, units: Any) -> Any:
        if op.kind is OperationKind.NORM_MATCH:
            tensor = tensor * 1.1
            held.append(tensor)
        return right(op, tensor, units)

    patch.setattr(registrar, "own_program", own_program)


def _dimension_left(patch: Patch) -> None:
    """Of a subspace a direction is left."""

    def change(_rows: Any, words: Any, _numbers: Any) -> None:
        own = words[:, Word.CODE] == Code.SUBSPACE
        words[own, Word.OPERAND] += words[own, Word.DTYPE] * torch.float32.itemsize
        words[own, Word.COUNT] -= 1

    change_instructions(patch, change)


def _keep_the_residual(patch: Patch) -> None:
    """What replaces a value leaves the other tensor's part in."""

    def execute(right: Any, codes: set[int], _rows: Any, hidden: Any, residual: Any) -> None:
        right(hidden, None if Code.SET in codes else residual)

    _change_execution(patch, execute)


def _read_off_by_one(patch: Patch) -> None:
    """A read takes the row before."""

    def execute(right: Any, codes: set[int], _rows: Any, hidden: Any, residual: Any) -> None:
        if codes == {Code.READ}:
            hidden, residual = (
                None if one is None else torch.cat([one[:1], one[:-1]]) for one in (hidden, residual)
            )
        right(hidden, residual)

    _change_execution(patch, execute)


def _read_in_place(patch: Patch) -> None:
    """A read adds the residual into the model's own memory."""

    def execute(right: Any, codes: set[int], rows: Any, hidden: Any, residual: Any) -> None:
        right(hidden, residual)
        if codes == {Code.READ} and residual is not None:
            index = torch.from_numpy(rows)
            hidden.index_add_(0, index, residual.index_select(0, index))

    _change_execution(patch, execute)


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
    right = operations_call.salted
    patch.setattr(harness, "salted", lambda compiled, _salt, secret: right(compiled, None, secret))


def _narrow_patterns(patch: Patch) -> None:
    """A part's patterns lack what its last position attends to itself."""
    right = collector.captured_patterns

    def captured(op: Any, records: Any, **options: Any) -> Any:
        points = right(op, records, **options)
        for point, result in points.items():
            values = np.frombuffer(result.data, f"u{ITEM_BYTES[result.dtype]}").copy().reshape(result.shape)
            values[..., -1:] = 0
            points[point] = dataclasses.replace(result, data=values.tobytes())
        return points

    patch.setattr(collector, "captured_patterns", captured)


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
    right = operations_call.prepare_params

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

    def change(_rows: Any, words: Any, numbers: Any) -> None:
        numbers[words[:, Word.CODE] == Code.DOT, Number.A] = 0

    change_instructions(patch, change)


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
