"""A step's table: the programs of all rows at all sites, made in one pass and sent to the device at once.

Operations become instructions here, see ``instructions``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp
from nnsight_engine.plans.step.active import ActiveOp, ActiveRequest
from nnsight_engine.plans.step.context import SiteKey
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.instructions import (
    DTYPE_CODES,
    Code,
    Execute,
    Executor,
    Instructions,
    Number,
    Numbers,
    Word,
    Words,
)

_NUM_AXES: Final = len(("tokens", "width"))

RowArray = npt.NDArray[np.int64]


def executor_of(device: torch.device, dtype: torch.dtype) -> Executor:
    """Return the executor for a model of a dtype, ready to run; this may take a while."""
    if device.type == "cpu":
        from nnsight_engine.plans.step import cpu_executor  # noqa: PLC0415

        cpu_executor.prepare()
        return cpu_executor.executor
    from nnsight_engine.plans.step import gpu_executor  # noqa: PLC0415

    gpu_executor.prepare(device, dtype)
    return gpu_executor.executor


class Member(NamedTuple):
    """An operation that takes part at a site; it ``writes`` if it may change the value there."""

    request: ActiveRequest
    active: ActiveOp
    writes: bool = False

    def fail(self, error: Exception) -> None:
        sites = self.active.op.sites
        where = str(sites[0]) if len(sites) == 1 else f"one of {sites[0]} to {sites[-1]}"
        self.request.fail_by(error, f"{self.active.op.kind} at {where} failed")


class Programs:
    """All programs of a step, which are sent to the device when one of them runs first; see ``Executor``."""

    def __init__(
        self,
        executor: Executor,
        device: torch.device,
        rows: RowArray,
        bounds: RowArray,
        words: Words,
        numbers: Numbers,
    ) -> None:
        self.rows, self.bounds, self.words, self.numbers = rows, bounds, words, numbers
        self._executor = executor
        self._device = device

    @functools.cached_property
    def execute(self) -> Execute:
        table = (self.rows, self.bounds, self.words, self.numbers)
        return self._executor(*(to_device(array, self._device) for array in table))


@dataclasses.dataclass(slots=True)
class Segment:
    """Programs ``first`` to ``stop``, without other work between them; values have at least ``num_rows``."""

    programs: Programs
    first: int
    stop: int
    members: list[Member]
    num_rows: int
    width: int

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        try:
            self._check(hidden, residual)
            self.programs.execute(self.first, self.stop, hidden, residual)
        except Exception as error:  # noqa: BLE001 - whatever was raised, it concerns these requests alone
            for member in self.members:
                member.fail(error)

    def _check(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Refuse a value that instructions would leave; they check nothing."""
        is_alike = residual is None or residual.shape == hidden.shape
        if (
            hidden.ndim != _NUM_AXES
            or len(hidden) < self.num_rows
            or hidden.shape[1] != self.width
            or not is_alike
        ):
            raise InterventionError(
                "intervention_failed",
                f"the value is {list(hidden.shape)}, and {self.num_rows} rows of {self.width} numbers were "
                "expected; this is a defect of the server, please report it with the model's name",
            )


class Block(NamedTuple):
    """Instructions of one operation at one or more sites, for some rows.

    ``order`` is their place among all work of the request at each site; ``columns`` are words that differ by
    row, each ``[sites, rows]`` or broadcast to it.
    """

    member: Member
    keys: Sequence[SiteKey]
    order: Sequence[int]
    rows: RowArray
    instructions: Instructions
    columns: Mapping[Word, Words | int]


class _Expanded(NamedTuple):
    """Instructions, one for each site and row; ``sites`` are numbers among the builder's sites."""

    sites: RowArray
    order: RowArray
    rows: RowArray
    words: Words
    numbers: Numbers


class TableBuilder:
    """Collects the instructions of a step; ``held`` are tensors that they point into, which must live on."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []
        self._blocks: list[Block] = []
        self._members: dict[SiteKey, list[Member]] = defaultdict(list)
        self._waits: dict[SiteKey, set[float]] = defaultdict(set)

    def add(self, block: Block) -> None:
        if len(block.rows):
            self._blocks.append(block)
            for key in block.keys:
                self._members[key].append(block.member)

    def wait(self, key: SiteKey, order: int) -> None:
        """Have instructions of an order at a site wait for those of other rows, and later ones for them."""
        self._waits[key] |= {order - 0.5, order + 0.5}

    def address(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor's first number, and keep the tensor."""
        self.held.append(tensor)
        return tensor.data_ptr()

    def segments(
        self,
        order_of_other_work: Mapping[SiteKey, Sequence[float]],
        executor: Executor,
        device: torch.device,
        width_of: Callable[[SiteKey], int],
    ) -> dict[SiteKey, list[tuple[float, Segment]]]:
        """Return the segments of each site, with their order; that of other work is ascending.

        A segment is all programs of a site between two pieces of other work; its order is half below the work
        that follows, infinite for the last. Instructions with the order of other work run before it: they
        belong to other requests.
        """
        if not self._blocks:
            return {}
        expanded = self._expanded()
        # The orders that end a part of a site's instructions: those of other work, and of waits.
        borders = {
            key: sorted({*order_of_other_work.get(key, ()), *self._waits.get(key, ())})
            for key in self._members
        }
        parts = self._part_of_each(expanded, borders)
        # A program is all that a part has for one row, so it comes together, in its order.
        by_row = np.lexsort((expanded.order, expanded.rows, parts, expanded.sites))
        sites, parts, rows = expanded.sites[by_row], parts[by_row], expanded.rows[by_row]
        is_new_segment = np.append(True, (np.diff(sites) != 0) | (np.diff(parts) != 0))
        is_new_program = is_new_segment | np.append(True, np.diff(rows) != 0)
        starts = np.flatnonzero(is_new_program)
        bounds = np.append(starts, len(rows))
        programs = Programs(
            executor, device, rows[starts], bounds, expanded.words[by_row], expanded.numbers[by_row]
        )
        first_programs = np.flatnonzero(is_new_segment[starts])
        return self._as_segments(programs, first_programs, sites, parts, borders, width_of)

    def _expanded(self) -> _Expanded:
        """Return the blocks' instructions, one for each site and row, in the order of ``add``."""
        numbers_of_keys = {key: number for number, key in enumerate(self._members)}
        site_order_count: list[tuple[int, int, int]] = []
        rows_of_sites: list[RowArray] = []
        for block in self._blocks:
            num_rows = len(block.rows)
            site_order_count += [
                (numbers_of_keys[key], order, num_rows)
                for key, order in zip(block.keys, block.order, strict=True)
            ]
            rows_of_sites += [block.rows] * len(block.keys)
        by_site = np.asarray(site_order_count, np.int64)
        counts = by_site[:, 2]
        sites, order = np.repeat(by_site[:, :2], counts, axis=0).T
        rows = np.concatenate(rows_of_sites)
        words = np.repeat(
            np.concatenate([block.instructions.words for block in self._blocks]), counts, axis=0
        )
        numbers = np.repeat(
            np.concatenate([block.instructions.numbers for block in self._blocks]), counts, axis=0
        )
        start = 0
        for block in self._blocks:
            shape = len(block.keys), len(block.rows)
            stop = start + shape[0] * shape[1]
            for word, values in block.columns.items():
                words[start:stop, word].reshape(shape)[:] = values
            start = stop
        return _Expanded(sites, order, rows, words, numbers)

    def _part_of_each(self, expanded: _Expanded, borders: Mapping[SiteKey, list[float]]) -> RowArray:
        """Return how many borders of its site each instruction comes after: those with a lower order."""
        parts = np.zeros(len(expanded.sites), np.int64)
        for number, key in enumerate(self._members):
            if borders[key]:
                at_site = expanded.sites == number
                parts[at_site] = np.searchsorted(borders[key], expanded.order[at_site])
        return parts

    def _as_segments(
        self,
        programs: Programs,
        first_programs: RowArray,
        sites: RowArray,
        parts: RowArray,
        borders: Mapping[SiteKey, list[float]],
        width_of: Callable[[SiteKey], int],
    ) -> dict[SiteKey, list[tuple[float, Segment]]]:
        """Return segments by site, given the first program of each; sites and parts are of instructions."""
        keys = list(self._members)
        by_key: dict[SiteKey, list[tuple[float, Segment]]] = defaultdict(list)
        stops = [*first_programs[1:].tolist(), len(programs.rows)]
        for first, stop in zip(first_programs.tolist(), stops, strict=True):
            first_instruction = programs.bounds[first]
            key, part = keys[sites[first_instruction]], int(parts[first_instruction])
            borders_here = borders[key]
            order = borders_here[part] - 0.5 if part < len(borders_here) else math.inf
            num_rows = int(programs.rows[first:stop].max()) + 1
            segment = Segment(programs, first, stop, self._members[key], num_rows, width_of(key))
            by_key[key].append((order, segment))
        return by_key


_CODES: Final = {
    OperationKind.ADD: Code.ADD,
    OperationKind.NORM_MATCH: Code.NORM_MATCH,
    OperationKind.PROJECT: Code.PROJECT,
    OperationKind.SUBSPACE: Code.SUBSPACE,
    OperationKind.REPLACE: Code.SET,
    OperationKind.ZERO: Code.SET,
    OperationKind.PATCH: Code.SET,
    OperationKind.FEATURE: Code.ADD,
    OperationKind.PROBE: Code.DOT,
}
"""The instruction of each operation that is the same in every step."""
_DEPENDENT: Final = (Code.NORM_MATCH, Code.PROJECT, Code.SUBSPACE)


def _kinds_with(*codes: Code) -> frozenset[OperationKind]:
    return frozenset(kind for kind, code in _CODES.items() if code in codes)


WITH_FACTORS: Final = _kinds_with(*_DEPENDENT)
"""Kinds whose instruction needs room for a number of each vector, see ``Code.NORM_MATCH``."""
NARROWED_KINDS: Final = WITH_FACTORS | {OperationKind.FEATURE}
"""Kinds of operations whose changes depend on the model's values, so that admission cannot check them."""
ALONG_VECTOR: Final = _kinds_with(Code.NORM_MATCH, Code.PROJECT)
"""Kinds whose operand is a direction, of length 1."""
IN_FLOAT32: Final = _kinds_with(*_DEPENDENT, Code.DOT)
"""Kinds whose operand is float32; that of others has the model's dtype."""


def own_program(
    op: PlannedOp, tensor: torch.Tensor | None, units: torch.Tensor | None
) -> Instructions | None:
    """Return an operation's instruction at each site, if it is one, and the same in every step.

    That of a patch is for its first position.
    """
    if op.kind not in _CODES or tensor is None:
        return None
    if len(tensor) not in {1, len(op.sites)}:
        raise RuntimeError(f"{len(tensor)} vectors are given for {len(op.sites)} sites")
    words, numbers = program = Instructions.blank(len(op.sites), _CODES[op.kind])
    words[:, Word.OPERAND] = tensor.data_ptr()
    if len(tensor) > 1:
        words[:, Word.OPERAND] += np.arange(len(op.sites)) * (tensor.stride(0) * tensor.itemsize)
    words[:, Word.DTYPE] = DTYPE_CODES[tensor.dtype]
    if units is not None:
        words[:, Word.UNITS], words[:, Word.COUNT] = units.data_ptr(), len(units)
    if op.kind is OperationKind.SUBSPACE:
        words[:, Word.COUNT], words[:, Word.DTYPE] = tensor.shape[-2], tensor.stride(-2)
    numbers[:, Number.A] = op.bias if op.kind is OperationKind.PROBE else op.offset
    numbers[:, Number.B] = op.scale
    numbers[:, Number.LOW] = -math.inf if op.low is None else op.low
    numbers[:, Number.HIGH] = math.inf if op.high is None else op.high
    return program


def reads(dtype: torch.dtype, count: int) -> Instructions:
    """Return ``count`` READ instructions that write a dtype, without addresses."""
    instructions = Instructions.blank(count, Code.READ)
    instructions.words[:, Word.DTYPE] = DTYPE_CODES[dtype]
    return instructions


def patch_bytes(active: ActiveOp) -> int:
    """Return the bytes between the rows of two positions in a patch's tensor."""
    tensor = active.tensor
    if tensor is None:
        raise RuntimeError("a patch has no tensor")
    return tensor.stride(-2) * tensor.itemsize


def addresses(tensor: torch.Tensor, columns: list[int]) -> Words:
    """Return the addresses of entries of a buffer ``[rows, columns, …]``, as ``[columns, rows]``."""
    rows = np.arange(len(tensor), dtype=np.int64)[None] * tensor.stride(0)
    column_offsets = np.asarray(columns, np.int64)[:, None] * tensor.stride(1)
    words: Words = tensor.data_ptr() + (rows + column_offsets) * tensor.itemsize
    return words


def in_order(stage: int, *, is_last_part: bool = False) -> int:
    """Return the order of work at a site; ``stage`` numbers a request's operations there.

    The last part of a stage, such as a test, follows the others.
    """
    return 2 * stage + is_last_part
