"""Plans detectors, the tests of conditions, and the gates of the operations that have conditions.

A test runs where its detector reads, and writes its state at each row into one buffer of the step. A gate
joins the states of an operation's tests, before the operation's first site. Tests with slots are evaluated at
every row, also where the operation does not act, and for rows that are computed again.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nnsight_engine.core.detector import Form
from nnsight_engine.plans.sites import forward_order
from nnsight_engine.plans.step.active import ActiveDetector, ActiveOp, ActiveTest
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.feature_kernels import FeatureParts, union_of
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.kernel_factory import KernelFactory, KernelMember, RowArray
from nnsight_engine.plans.step.operation_rows import OperationRows
from nnsight_engine.plans.step.plan import KernelGroup, ReadGroup, ReadSlice, Span, StepPlan
from nnsight_engine.plans.step.scores import (
    AnyParts,
    GateKernel,
    HeldBefore,
    HeldNow,
    LinearParts,
    PlainTests,
    ScoreKernel,
    SlotTests,
    TestColumns,
)
from nnsight_engine.plans.step.stage import SiteKey, site_key
from nnsight_engine.plans.step.writes import Kernel

Staged = dict[SiteKey, list[tuple[int, KernelGroup]]]


@dataclasses.dataclass(slots=True)
class DetectorRows:
    """The rows at which a detector is read in this step.

    Attributes:
        span: The request's rows in the step.
        active: The operation.
        detector: The detector.
        offsets: Offsets of the rows in the span, ascending.
        stages: Stage of the reading at the site of each part.
        number: Number of the test among the operation's; None for an operation that reads scores.
        start: First of its rows among those of its group; of tests, among those of the step.
    """

    span: Span
    active: ActiveOp
    detector: ActiveDetector
    offsets: RowArray
    stages: tuple[int, ...]
    number: int | None = None
    start: int = 0

    @property
    def test(self) -> ActiveTest:
        """The test."""
        if self.number is None:
            raise RuntimeError("an operation that reads scores has no test")
        return self.active.tests[self.number]

    @property
    def stop(self) -> int:
        """One past the last of its rows, see ``start``."""
        return self.start + len(self.offsets)


class ConditionPlanner:
    """Plans conditions and detectors for a step.

    Args:
        context: The model.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context

    def tests_of(
        self, span: Span, active: ActiveOp, offsets: RowArray, stages: dict[SiteKey, int]
    ) -> list[DetectorRows]:
        """Return the rows of an operation's tests, and count their stages.

        Args:
            span: The request's rows.
            active: The operation.
            offsets: The rows on which the operation acts.
            stages: Number of operations planned so far at each site.
        """
        found = []
        for number, test in enumerate(active.tests):
            own = np.arange(span.num_rows) if test.slot is not None else offsets
            if test.test.has_history and not test.is_started:
                if span.start:
                    span.request.fail(
                        "intervention_failed",
                        f"a condition depends on positions from 0 on, and the first that was computed is "
                        f"{span.start}; this is a defect of the server, please report it",
                    )
                test.is_started = True
            if not len(own):
                continue
            numbers = tuple(stages[key] for key in test.detector.keys)
            for key in test.detector.keys:
                stages[key] += 1
            found.append(DetectorRows(span, active, test.detector, own, numbers, number))
        return found

    def plan_conditions(
        self, plan: StepPlan, tests: list[DetectorRows], work: list[OperationRows], staged: Staged
    ) -> None:
        """Plan the tests of a step, and the gates of the operations that they are for.

        Args:
            plan: The step's plan.
            tests: The rows of the tests.
            work: The step's operations.
            staged: Kernels by site.
        """
        if not tests:
            return
        states = self._plan_tests(plan, tests, staged)
        gated = [item for item in work if item.active.tests]
        if gated:
            self._plan_gates(plan, gated, tests, states, staged)

    def _plan_tests(self, plan: StepPlan, tests: list[DetectorRows], staged: Staged) -> torch.Tensor:
        """Plan the tests of a step; return their states, ``[rows of all tests]``."""
        groups: dict[Any, list[DetectorRows]] = defaultdict(list)
        for item in tests:
            groups[_test_key(item)].append(item)
        states = torch.zeros(
            sum(len(item.offsets) for item in tests), dtype=torch.bool, device=self._context.device
        )
        start = 0
        for items in groups.values():
            first = start
            for item in items:
                item.start, start = start, start + len(item.offsets)
            out = states[first:start]

            def kernel(some: list[DetectorRows], scores: ScoreKernel, out: torch.Tensor) -> Kernel:
                return self._test_kernel(plan, some, scores, out)

            self._plan_group(plan, items, first, out, staged, kernel)
        return states

    def plan_scores(self, plan: StepPlan, items: list[OperationRows], staged: Staged) -> None:
        """Plan operations of one form that read scores."""
        rows, start = [], 0
        slices = []
        for item in items:
            detector = item.active.detector
            if detector is None:
                raise RuntimeError("the operation has no detector")
            own = DetectorRows(item.span, item.active, detector, item.offsets, item.stages, start=start)
            rows.append(own)
            slices.append(ReadSlice(item.span.request, item.active, start, own.stop, item.offsets))
            start = own.stop
        out = torch.empty(start, device=self._context.device)
        masks = [item.mask for item in items if item.mask is not None]
        plan.reads.append(
            ReadGroup([out.unsqueeze(1)], slices, plan.add_mask(torch.cat(masks)) if masks else None)
        )
        self._plan_group(plan, rows, 0, out, staged, _score_kernel)

    def _plan_gates(
        self,
        plan: StepPlan,
        items: list[OperationRows],
        tests: list[DetectorRows],
        states: torch.Tensor,
        staged: Staged,
    ) -> None:
        """Plan the gates of operations, deliver them, and give each operation its own.

        Args:
            plan: The step's plan.
            items: The operations with conditions.
            tests: Their tests, planned.
            states: The states of these.
            staged: Kernels by site.
        """
        by_test = {(id(one.span), one.active.index, one.number): one for one in tests}
        groups: dict[Any, list[OperationRows]] = defaultdict(list)
        for item in items:
            groups[_gate_key(item, self.gate_key(item.active))].append(item)
        gates = torch.zeros(
            sum(len(item.offsets) for item in items), dtype=torch.bool, device=self._context.device
        )
        slices, start = [], 0
        for group in groups.values():
            first, members = start, []
            for item in group:
                stop = start + len(item.offsets)
                item.gate, item.gate_start = gates, start
                slices.append(_slice_of_gate(item, start, stop))
                members.append(KernelMember(item.span.request, item.active, 0, item.rows))
                start = stop

            def rebuild(
                member: KernelMember,
                members: list[KernelMember] = members,
                group: list[OperationRows] = group,
            ) -> Kernel:
                item = group[[id(one) for one in members].index(id(member))]
                own = gates[item.gate_start : item.gate_start + len(item.offsets)]
                return self._gate(plan, [item], by_test, states, own)

            kernel = self._gate(plan, group, by_test, states, gates[first:start])
            staged[self.gate_key(group[0].active)].append(
                (group[0].gate_stage, KernelGroup(kernel, members, rebuild))
            )
        plan.reads.append(ReadGroup([gates.unsqueeze(1)], slices))

    def gate_key(self, active: ActiveOp) -> SiteKey:
        """Return where an operation's gate runs: behind its tests, before its first site."""
        now = [own.test.detector.sites[-1] for own in active.tests if not own.test.is_next]
        sites, choose = (now, max) if now else (active.op.sites, min)
        return site_key(choose(sites, key=lambda site: forward_order(site, self._context.spec)))

    def _gate(
        self,
        plan: StepPlan,
        items: Sequence[OperationRows],
        by_test: dict[tuple[int, int, int | None], DetectorRows],
        states: torch.Tensor,
        out: torch.Tensor,
    ) -> GateKernel:
        condition = items[0].active.op.when
        if condition is None:
            raise RuntimeError("the operation has no condition")
        sources: list[HeldNow | HeldBefore] = []
        for number, test in enumerate(condition.tests):
            if test.is_next:
                slots = [item.active.tests[number].slot for item in items]
                rows = [slot.row for slot in slots if slot is not None]
                counts = [len(item.offsets) for item in items]
                table = slots[0].table if slots[0] is not None else None
                if table is None:
                    raise RuntimeError("a test for the next position has no slot")
                positions = np.concatenate([item.offsets + (item.span.start - 1) for item in items])
                source = HeldBefore(
                    table, self._on_device(np.repeat(rows, counts)), self._on_device(positions)
                )
                plan.moving.append(source)
                sources.append(source)
                continue
            index = []
            for item in items:
                own = by_test[id(item.span), item.active.index, number]
                index.append(own.start + np.searchsorted(own.offsets, item.offsets))
            sources.append(HeldNow(states, self._on_device(np.concatenate(index))))
        masks = [item.mask for item in items if item.mask is not None]
        if masks and len(masks) < len(items):
            raise RuntimeError("some operations of a group have masks and others have none")
        return GateKernel(condition.program, sources, torch.cat(masks) if masks else None, out)

    def _plan_group(
        self,
        plan: StepPlan,
        items: list[DetectorRows],
        first: int,
        out: torch.Tensor,
        staged: Staged,
        kernel: Callable[[list[DetectorRows], ScoreKernel, torch.Tensor], Kernel],
    ) -> None:
        """Plan detectors that are read alike, and the kernel behind their last parts.

        Args:
            plan: The step's plan.
            items: Their rows, which follow each other.
            first: First of their rows.
            out: Receives the kernel's results, ``[rows]``.
            staged: Kernels by site.
            kernel: Returns the kernel for some of them.
        """
        detector = items[0].detector
        parts = torch.empty(len(out), len(detector.keys), device=self._context.device)
        members: list[KernelMember] = []
        for place, key in enumerate(detector.keys):
            members = [
                KernelMember(
                    item.span.request,
                    item.active,
                    place,
                    item.offsets + item.span.row,
                    read_site=item.detector.planned.sites[place],
                )
                for item in items
            ]
            by_member = {id(member): item for member, item in zip(members, items, strict=True)}

            def part(
                some: Sequence[KernelMember],
                place: int = place,
                by_member: dict[int, DetectorRows] = by_member,
            ) -> Kernel:
                own = [by_member[id(member)] for member in some]
                column = parts[own[0].start - first : own[-1].stop - first, place]
                return _part_kernel(plan.factory, list(some), own, place, column)

            group = KernelGroup(part(members), members, _alone(part))
            staged[key].append((items[0].stages[place], group))

        def scored(some: list[DetectorRows]) -> Kernel:
            rows = slice(some[0].start - first, some[-1].stop - first)
            bias = [item.detector.planned.bias for item in some for _ in item.offsets]
            scores = ScoreKernel(
                parts[rows], self._on_device(np.asarray(bias, np.float32)), detector.planned.link, out[rows]
            )
            return kernel(some, scores, out[rows])

        last = {id(member): item for member, item in zip(members, items, strict=True)}
        group = KernelGroup(scored(items), members, lambda member: scored([last[id(member)]]))
        staged[detector.keys[-1]].append((items[0].stages[-1], group))

    def _test_kernel(
        self, plan: StepPlan, items: list[DetectorRows], scores: ScoreKernel, out: torch.Tensor
    ) -> Kernel:
        tests = [item.test.test for item in items]
        slot = items[0].test.slot
        counts = [len(item.offsets) for item in items]
        values = np.array(
            [(test.sign, test.threshold, test.threshold - test.hysteresis, test.latches) for test in tests],
            np.float32,
        )
        if slot is None:
            columns = self._columns(np.repeat(values, counts, axis=0))
            return PlainTests(scores, columns, out)
        rows = [item.test.slot.row for item in items if item.test.slot is not None]
        kernel = SlotTests(
            scores,
            self._columns(values[:, None]),
            tests[0].over,
            tests[0].length,
            tests[0].reduce == "mean",
            slot.table,
            self._on_device(np.asarray(rows, np.int64)),
            self._on_device(np.asarray([item.span.start for item in items], np.int64)),
            self._on_device(np.asarray([[item.span.request.plan.prompt_len] for item in items], np.int64)),
            self._on_device(np.repeat(np.arange(len(items)), counts)),
            self._on_device(np.concatenate([item.offsets for item in items])),
            max(counts),
            out,
        )
        plan.moving.append(kernel)
        return kernel

    def _columns(self, values: np.ndarray[Any, np.dtype[np.float32]]) -> TestColumns:
        sign, threshold, keeps, latches = (
            self._on_device(np.ascontiguousarray(values[..., i])) for i in range(4)
        )
        return TestColumns(sign, threshold, keeps, latches > 0)

    def _on_device(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return to_device(values, self._context.device)


def _alone(build: Callable[[Sequence[KernelMember]], Kernel]) -> Callable[[KernelMember], Kernel]:
    return lambda member: build([member])


def _slice_of_gate(item: OperationRows, start: int, stop: int) -> ReadSlice:
    """Return an operation's part of the gates; of rows that are computed again it is not delivered again."""
    request = item.span.request
    num_delivered = int(np.searchsorted(item.offsets, request.end_position - item.span.start))
    return ReadSlice(request, item.active, start, stop, item.offsets, num_delivered=num_delivered)


def _score_kernel(_: list[DetectorRows], scores: ScoreKernel, __: torch.Tensor) -> Kernel:
    return scores


def _part_kernel(
    factory: KernelFactory,
    members: list[KernelMember],
    items: list[DetectorRows],
    place: int,
    out: torch.Tensor,
) -> Kernel:
    rows = factory.row_index(members)
    form = items[0].detector.planned.parts[place].form
    if form is None:
        return _feature_kernel(rows, items, place, out)
    if form is Form.LINEAR and all(len(item.offsets) == 1 for item in items):
        weights = torch.stack([item.detector.tensors[place]["weights"] for item in items])
        return LinearParts(rows, weights, out)
    first = items[0].start
    pieces = [(item.start - first, item.stop - first, item.detector.tensors[place]) for item in items]
    return AnyParts(rows, form, pieces, out)


def _feature_kernel(rows: torch.Tensor, items: list[DetectorRows], place: int, out: torch.Tensor) -> Kernel:
    planned = [one for item in items if (one := item.detector.planned.parts[place].features) is not None]
    loaded = items[0].detector.dictionaries[place]
    if loaded is None or len(planned) < len(items):
        raise RuntimeError("a part without a form has no feature")
    ids = union_of(planned)
    columns = np.searchsorted(np.asarray(ids), np.asarray([one.ids[0] for one in planned]))
    of_rows = np.repeat(columns, [len(item.offsets) for item in items]).astype(np.int64)
    column = to_device(of_rows, rows.device).unsqueeze(1)
    return FeatureParts(rows, loaded.selection(ids), column, out)


def _test_key(item: DetectorRows) -> Any:
    """Return the key shared by tests that one group of kernels can serve."""
    test, slot = item.test.test, item.test.slot
    shared = None if slot is None else (id(slot.table), test.over, test.length, test.reduce)
    return (*detector_key(item.detector), item.stages, shared)


def detector_key(detector: ActiveDetector) -> tuple[Any, ...]:
    """Return the key shared by detectors that one group of kernels can serve."""
    planned = detector.planned
    forms = tuple(part.form for part in planned.parts)
    return (detector.keys, forms, tuple(map(id, detector.dictionaries)), planned.link)


def _gate_key(item: OperationRows, first: SiteKey) -> Any:
    """Return the key shared by operations whose gates one kernel can compute."""
    condition = item.active.op.when
    tests = zip(item.active.tests, () if condition is None else condition.tests, strict=True)
    tables = tuple(
        id(own.slot.table) if test.is_next and own.slot is not None else None for own, test in tests
    )
    program = None if condition is None else condition.program
    return (first, item.gate_stage, program, tables, item.mask is not None)
