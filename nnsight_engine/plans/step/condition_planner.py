"""Plans scores, the tests of conditions, and the gates of the operations that have conditions.

A test writes its state at each row into one buffer of the step; a gate joins the states of an operation's
tests, before its first site. Tests with slots are evaluated at every row, also where the operation does not
act, and for rows that are computed again.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.core.detector import Form, Link
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.request_plan import AND, NOT, OR, PlannedFeatures, forward_order
from nnsight_engine.plans.step.active import MLP_OUTPUT, ActiveOp, ActiveScore, ActiveTest, PartTensors
from nnsight_engine.plans.step.context import SiteKey, site_key
from nnsight_engine.plans.step.feature_kernels import FeatureParts, bounded, union_of
from nnsight_engine.plans.step.instructions import AND as AND_WORD
from nnsight_engine.plans.step.instructions import NOT as NOT_WORD
from nnsight_engine.plans.step.instructions import OR as OR_WORD
from nnsight_engine.plans.step.instructions import Code, History, Instructions, Number, Word, Words
from nnsight_engine.plans.step.operation_rows import OperationRows, PlanInProgress
from nnsight_engine.plans.step.plan import (
    Kernel,
    KernelGroup,
    MovingWords,
    ReadGroup,
    ReadSlice,
    Span,
)
from nnsight_engine.plans.step.table import Block, Member, RowArray, TableBuilder, addresses, in_order

_JOIN: Final = Instructions.blank(1, Code.JOIN)
_PARTS: Final = {
    Form.LINEAR: Instructions.blank(1, Code.DOT),
    Form.DISTANCE: Instructions.blank(1, Code.DISTANCE),
    Form.MLP: Instructions.blank(1, Code.MLP),
}
_OVER: Final = {"position": 0, "window": 1, "prompt": 2}
_OPERATORS: Final[dict[int | str, int]] = {NOT: NOT_WORD, AND: AND_WORD, OR: OR_WORD}


@dataclasses.dataclass(slots=True)
class ScoreRows:
    """The rows at which a score is read in this step.

    ``stages`` are those at the site of each part. ``number`` is the test's among the operation's; None for an
    operation that reads scores. ``start`` counts rows of its group; of tests, those of the step.
    """

    span: Span
    active: ActiveOp
    score: ActiveScore
    offsets: RowArray
    stages: tuple[int, ...]
    number: int | None = None
    start: int = 0

    @property
    def test(self) -> ActiveTest:
        if self.number is None:
            raise RuntimeError("an operation that reads scores has no test")
        return self.active.tests[self.number]

    @property
    def member(self) -> Member:
        return Member(self.span.request, self.active)

    @property
    def stop(self) -> int:
        return self.start + len(self.offsets)


def tests_of(span: Span, active: ActiveOp, offsets: RowArray, stages: dict[SiteKey, int]) -> list[ScoreRows]:
    """Return the rows of an operation's tests, and count their stages."""
    tests = []
    for number, test in enumerate(active.tests):
        positions = np.arange(span.num_rows) if test.slot is not None else offsets
        if test.test.has_history and not test.is_started:
            if span.start:
                span.request.fail(
                    "intervention_failed",
                    f"a condition depends on positions from 0 on, and the first that was computed is "
                    f"{span.start}; this is a defect of the server, please report it",
                )
            test.is_started = True
        if not len(positions):
            continue
        numbers = tuple(stages[key] for key in test.score.keys)
        for key in test.score.keys:
            stages[key] += 1
        tests.append(ScoreRows(span, active, test.score, positions, numbers, number))
    return tests


def plan_conditions(work: PlanInProgress, tests: list[ScoreRows], items: list[OperationRows]) -> None:
    """Plan the tests of a step, and the gates of the operations that have a condition."""
    if not tests:
        return
    states = _plan_tests(work, tests)
    gated = [item for item in items if item.active.tests]
    if gated:
        _plan_gates(work, gated, tests, states)


def _plan_tests(work: PlanInProgress, tests: list[ScoreRows]) -> torch.Tensor:
    """Plan all tests, those of the same form together; return their states, a byte for each row of each."""
    groups: dict[Any, list[ScoreRows]] = defaultdict(list)
    for item in tests:
        groups[_test_key(item)].append(item)
    states = torch.zeros(
        sum(len(item.offsets) for item in tests), dtype=torch.bool, device=work.context.device
    )
    start = 0
    for items in groups.values():
        first = start
        for item in items:
            item.start, start = start, start + len(item.offsets)
        out = states[first:start]
        parts = _plan_parts(work, items, first, len(out))
        order = in_order(items[0].stages[-1], is_last_part=True)
        if items[0].test.slot is not None:
            _add_histories(work, items, parts, out, order)
        else:
            _add_scores(work, Code.TEST, items, parts, out, order)
    return states


def plan_scores(work: PlanInProgress, items: list[OperationRows]) -> None:
    """Plan the reads of scores of the same form, for operations whose result they are, into one buffer."""
    rows, start = [], 0
    slices = []
    for item in items:
        score = item.active.score
        if score is None:
            raise RuntimeError("the operation has no score")
        score_rows = ScoreRows(item.span, item.active, score, item.offsets, item.stages, start=start)
        rows.append(score_rows)
        slices.append(ReadSlice(item.span.request, item.active, start, score_rows.stop, item.offsets))
        start = score_rows.stop
    out = torch.empty(start, device=work.context.device)
    work.plan.reads.append(ReadGroup([out.unsqueeze(1)], slices, work.mask_of(items)))
    parts = _plan_parts(work, rows, 0, start)
    order = in_order(rows[0].stages[-1], is_last_part=True)
    _add_scores(work, Code.SCORE, rows, parts, out, order)


def _plan_gates(
    work: PlanInProgress, items: list[OperationRows], tests: list[ScoreRows], states: torch.Tensor
) -> None:
    """Plan a gate for each row of each operation: a JOIN, in postfix order, of the addresses of states."""
    by_test = {(id(planned.span), planned.active.index, planned.number): planned for planned in tests}
    gates = torch.zeros(
        sum(len(item.offsets) for item in items), dtype=torch.bool, device=work.context.device
    )
    first_gate, first_state = work.table.address(gates), work.table.address(states)
    programs = [_program(item) for item in items]
    sizes = [len(item.offsets) * len(program) for item, program in zip(items, programs, strict=True)]
    words, moves = np.empty(sum(sizes), np.int64), np.zeros(sum(sizes), np.int64)
    stops = np.cumsum(sizes).tolist()
    slices, start = [], 0
    for item, program, size, stop in zip(items, programs, sizes, stops, strict=True):
        shape = len(item.offsets), len(program)
        item_words, item_moves = (part[stop - size : stop].reshape(shape) for part in (words, moves))
        for place, step in enumerate(program):
            if isinstance(step, int):
                item_words[:, place], item_moves[:, place] = _state(work, item, step, by_test, first_state)
            else:
                item_words[:, place] = _OPERATORS[step]
        item.gate, item.gate_start = gates, start
        start += len(item.offsets)
        slices.append(_slice_of_gate(item, item.gate_start, start))
    on_device = work.on_device(words)
    if moves.any():
        work.plan.moving.append(MovingWords(on_device, work.on_device(moves)))
    first_word = work.table.address(on_device)
    for item, program, size, stop in zip(items, programs, sizes, stops, strict=True):
        rows = np.arange(len(item.offsets))
        own_words: dict[Word, Words | int] = {
            Word.COUNT: len(program),
            Word.OPERAND: first_word + (stop - size + rows * len(program)) * words.itemsize,
            Word.OUT: first_gate + item.gate_start + rows,
        }
        if item.mask is not None:
            own_words[Word.UNITS] = work.table.address(item.mask) + rows
        order = [in_order(item.gate_stage)]
        key = gate_key(item.active, work.context.spec)
        work.table.add(Block(item.member, [key], order, item.rows, _JOIN, own_words))
    work.plan.reads.append(ReadGroup([gates.unsqueeze(1)], slices))


def _state(
    work: PlanInProgress,
    item: OperationRows,
    number: int,
    by_test: dict[tuple[int, int, int | None], ScoreRows],
    first_state: int,
) -> tuple[Words, int]:
    """Return the addresses of a test's state at each row, and how far they move with each position."""
    test = item.active.tests[number]
    if not test.test.is_next:
        test_rows = by_test[id(item.span), item.active.index, number]
        return first_state + test_rows.start + np.searchsorted(test_rows.offsets, item.offsets), 0
    # That of the position before. No row is the first of its request: such tests act on generated ones.
    if test.slot is None:
        raise RuntimeError("a test for the next position has no slot")
    held = test.slot.table.held
    positions = item.offsets + (item.span.start - 1)
    return work.table.address(held[test.slot.row]) + positions, held.itemsize


def gate_key(active: ActiveOp, spec: ModelSpec) -> SiteKey:
    """Return where an operation's gate runs: behind its tests, before its first site."""
    read_here = [test.test.score.sites[-1] for test in active.tests if not test.test.is_next]
    sites, choose = (read_here, max) if read_here else (active.op.sites, min)
    return site_key(choose(sites, key=lambda site: forward_order(site, spec)))


def _plan_parts(work: PlanInProgress, items: list[ScoreRows], first: int, num_rows: int) -> torch.Tensor:
    """Plan the parts of scores; return them, ``[rows, parts]``, from the row with number ``first`` on."""
    score = items[0].score
    parts = torch.empty(num_rows, len(score.keys), device=work.context.device)
    work.table.address(parts)
    for place, key in enumerate(score.keys):
        order, form = in_order(items[0].stages[place]), score.planned.parts[place].form
        if form is not None:
            to, instruction = addresses(parts, [place]), _PARTS[form]
            for item in items:
                words = _operands(form, item.score.tensors[place])
                words[Word.OUT] = to[:, item.start - first : item.stop - first]
                rows = item.offsets + item.span.row
                work.table.add(Block(item.member, [key], [order], rows, instruction, words))
            continue
        kernel_of = partial(_feature_kernel, work, place, parts[:, place], first)
        members = [item.member for item in items]
        group = KernelGroup(kernel_of(items), members, partial(_alone, kernel_of, items))
        work.staged[key].append((order, group))
    return parts


def _add_scores(
    work: PlanInProgress,
    code: Code,
    items: list[ScoreRows],
    parts: torch.Tensor,
    out: torch.Tensor,
    order: int,
) -> None:
    """Add the instruction, SCORE or TEST, of each row of scores, from its ``parts`` to ``out``."""
    first = items[0].start
    to = addresses(out.unsqueeze(1), [0])
    operands, instructions = _scored(work, code, items, parts, out)
    for number, item in enumerate(items):
        part = slice(item.start - first, item.stop - first)
        words: dict[Word, Words | int] = {Word.OPERAND: operands[:, part], Word.OUT: to[:, part]}
        keys, rows = [item.score.keys[-1]], item.offsets + item.span.row
        work.table.add(Block(item.member, keys, [order], rows, instructions.select([number]), words))


def _add_histories(
    work: PlanInProgress, items: list[ScoreRows], parts: torch.Tensor, out: torch.Tensor, order: int
) -> None:
    """Add the instructions of tests with slots, one for all rows of each, at the last of them."""
    first = items[0].start
    to = addresses(out.unsqueeze(1), [0])[0]
    operands, instructions = _scored(work, Code.HISTORY, items, parts, out)
    records = work.on_device(np.concatenate([_history(work.table, item) for item in items]))
    moves = np.zeros((len(items), len(History)), np.int64)
    moves[:, History.POSITION] = 1
    work.plan.moving.append(MovingWords(records, work.on_device(moves.ravel())))
    first_record = work.table.address(records)
    key = items[0].score.keys[-1]
    for number, item in enumerate(items):
        row = item.start - first
        words: dict[Word, Words | int] = {
            Word.OPERAND: operands[:, row : row + 1],
            Word.OUT: int(to[row]),
            Word.UNITS: first_record + number * len(History) * records.itemsize,
        }
        rows = item.offsets[-1:] + item.span.row
        work.table.add(Block(item.member, [key], [order], rows, instructions.select([number]), words))
    if any(len(item.offsets) > 1 for item in items):
        work.table.wait(key, order)


def _scored(
    work: PlanInProgress, code: Code, items: list[ScoreRows], parts: torch.Tensor, out: torch.Tensor
) -> tuple[Words, Instructions]:
    """Return the addresses of the rows' parts, ``[1, rows]``, and each item's instruction without them."""
    work.table.address(out)
    instructions = Instructions.blank(len(items), code)
    instructions.words[:, Word.COUNT] = parts.shape[1]
    instructions.words[:, Word.DTYPE] = items[0].score.planned.link is not Link.IDENTITY
    instructions.numbers[:, Number.A] = [item.score.planned.bias for item in items]
    if code is not Code.SCORE:
        tests = [item.test.test for item in items]
        instructions.numbers[:, Number.B] = [test.sign for test in tests]
        instructions.numbers[:, Number.LOW] = [test.threshold for test in tests]
        instructions.numbers[:, Number.HIGH] = [test.threshold - test.hysteresis for test in tests]
    return addresses(parts, [0]), instructions


def _program(item: OperationRows) -> tuple[int | str, ...]:
    condition = item.active.op.when
    if condition is None:
        raise RuntimeError("the operation has no condition")
    return condition.program


def _alone(build: Callable[[list[ScoreRows]], Kernel], items: list[ScoreRows], number: int) -> Kernel:
    return build(items[number : number + 1])


def _slice_of_gate(item: OperationRows, start: int, stop: int) -> ReadSlice:
    """Return an operation's part of the gates; of rows that are computed again it is not delivered again."""
    request = item.span.request
    num_delivered = int(np.searchsorted(item.offsets, request.end_position - item.span.start))
    return ReadSlice(request, item.active, start, stop, item.offsets, num_delivered=num_delivered)


def _operands(form: Form, tensors: PartTensors) -> dict[Word, Words | int]:
    """Return the words that point to the tensors of one part of a score."""
    match form:
        case Form.LINEAR:
            return {Word.OPERAND: tensors["weights"].data_ptr()}
        case Form.DISTANCE:
            return {Word.OPERAND: tensors["mean"].data_ptr(), Word.UNITS: tensors["scale"].data_ptr()}
        case Form.MLP:
            hidden, output = tensors["hidden_weights"], tensors[MLP_OUTPUT]
            return {
                Word.OPERAND: hidden.data_ptr(),
                Word.UNITS: output.data_ptr(),
                Word.COUNT: len(hidden),
            }


def _history(table: TableBuilder, item: ScoreRows) -> Words:
    """Return the numbers of a test with a slot, in the order of ``History``."""
    test, slot = item.test.test, item.test.slot
    if slot is None:
        raise RuntimeError("the test has no slot")
    columns = (slot.table.scores, slot.table.reduced, slot.table.held)
    words = [len(item.offsets), item.span.start, item.span.request.plan.prompt_len, _OVER[test.over]]
    words += [test.length, test.reduce == "mean", test.latches]
    words += [table.address(column) + slot.row * column.stride(0) * column.itemsize for column in columns]
    return np.asarray(words, np.int64)


def _feature_kernel(
    work: PlanInProgress, place: int, column: torch.Tensor, first: int, items: list[ScoreRows]
) -> Kernel:
    """Return a kernel for some of the scores whose parts have a column, which begins at row ``first``."""
    rows = work.on_device(np.concatenate([item.offsets + item.span.row for item in items]))
    out = column[items[0].start - first : items[-1].stop - first]

    def features_of(item: ScoreRows) -> PlannedFeatures:
        features = item.score.planned.parts[place].features
        if features is None:
            raise RuntimeError("a part without a form has no feature")
        return features

    pieces, start = [], 0
    for batch in bounded(items, features_of, lambda item: len(item.offsets)):
        loaded = batch[0].score.dictionaries[place]
        if loaded is None:
            raise RuntimeError("a feature has no dictionary")
        planned = list(map(features_of, batch))
        ids = union_of(planned)
        columns = np.searchsorted(np.asarray(ids), np.asarray([score.ids[0] for score in planned]))
        of_rows = np.repeat(columns, [len(item.offsets) for item in batch]).astype(np.int64)
        own_column = work.on_device(of_rows).unsqueeze(1)
        pieces.append((start, start + len(of_rows), loaded.selection(ids), own_column))
        start += len(of_rows)
    return FeatureParts(rows, pieces, out)


def _test_key(item: ScoreRows) -> Any:
    return (*score_key(item.score), item.stages, item.test.slot is not None)


def score_key(score: ActiveScore) -> tuple[Any, ...]:
    """Return what scores must have in common to be planned together."""
    planned = score.planned
    forms = tuple(part.form for part in planned.parts)
    return (score.keys, forms, tuple(map(id, score.dictionaries)), planned.link)
