"""Instructions: what operations do to one row of a site's value, as numbers that an executor reads.

A row's *program* is a run of instructions, executed in order. An instruction is a row of two arrays,
``words`` (int64, by ``Word``) and ``numbers`` (float32, by ``Number``). Operands and results are named by
addresses in the memory of the model's device; a step's plan holds the tensors that they point into.

The value ``x`` of a row is ``hidden + residual`` if the engine keeps the residual stream in two tensors, else
``hidden``. Changes are computed in float32, rounded to the dtype of ``hidden`` and added to it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.core.errors import InterventionError


class Code(enum.IntEnum):
    """What an instruction does; words and numbers that are not named are unused.

    Attributes:
        ADD: ``x += OPERAND``, ``[width]`` of ``DTYPE``.
        NORM_MATCH: ``x += |x| * OPERAND``, float32. It, PROJECT and SUBSPACE have room for a float32 number
            of each vector at ``OUT``.
        PROJECT: The component ``c`` of ``x`` along the unit vector ``OPERAND``, float32, becomes
            ``c - B * c + A``, then at least ``LOW`` and at most ``HIGH``.
        SUBSPACE: ``x -= B * (part of x in the span of OPERAND)``, an orthonormal basis ``[COUNT, width]`` in
            float32 whose rows are ``DTYPE`` numbers apart.
        SET: ``x = OPERAND``, ``[width]`` of ``DTYPE``; with ``COUNT`` only the units whose int64 indices are
            at ``UNITS``.
        READ: ``OUT = x`` in ``DTYPE``.
        DOT: ``OUT = x·OPERAND + A``, float32.
        SCORE: ``OUT = link(sum of the COUNT numbers at OPERAND + A)``, float32; the link is the sigmoid if
            ``DTYPE`` is 1.
        TEST: ``OUT``, a byte, is whether ``B`` times that score is above ``LOW``.
        DISTANCE: ``OUT = -|(x - OPERAND) * UNITS|``, both ``[width]``, float32.
        MLP: ``OUT = relu(OPERAND x + UNITS[0])·UNITS[1]``, float32; ``OPERAND`` is ``[COUNT, width]``, and
            ``UNITS`` ``[2, COUNT]``.
        CHANGE: ``x += OPERAND``, ``[width]``, float32.
        MEAN: ``OUT``, ``[width]`` float32, is the mean of ``x`` over the ``COUNT`` rows at ``UNITS``, as they
            are when the program begins.
        HISTORY: ``OUT``, bytes, are whether a test with a slot holds at each row of a request. Its scores are
            made as by SCORE, times ``B``, from ``COUNT`` numbers for each row at ``OPERAND``. It begins to
            hold above ``LOW``, and holds on above ``HIGH``; ``UNITS`` is the address of the rest, see
            ``History``. Numbers of other rows must be there before the program runs.
        JOIN: ``OUT``, a byte, is the value of the postfix program of ``COUNT`` words at ``OPERAND``: the
            addresses of bytes, ``NOT``, ``AND`` and ``OR``. It is 0 where the byte at ``UNITS`` is 0.
    """

    ADD = 0
    NORM_MATCH = 1
    PROJECT = 2
    SUBSPACE = 3
    SET = 4
    READ = 5
    DOT = 6
    SCORE = 7
    TEST = 8
    JOIN = 9
    DISTANCE = 10
    MLP = 11
    HISTORY = 12
    CHANGE = 13
    MEAN = 14


class Word(enum.IntEnum):
    """The columns of ``words``; an address is 0 for none.

    Attributes:
        CODE: The ``Code``.
        OPERAND: Address of the operand.
        OUT: Address of the result.
        GATE: Address of a byte; the instruction is left out where that is 0.
        OVERFLOW: Address of a byte. READ sets it to whether a finite number of ``x`` is infinite in
            ``DTYPE``. NORM_MATCH, PROJECT, SUBSPACE and CHANGE set it to 1 where that holds for the change,
            and leave ``x``.
        UNITS: Address of indices, of a mask, or of more operands.
        COUNT: A number of units, vectors, scores or words.
        DTYPE: A dtype's code, see ``DTYPE_CODES``; of scores the link; of SUBSPACE the rows' distance.
    """

    CODE = 0
    OPERAND = 1
    OUT = 2
    GATE = 3
    OVERFLOW = 4
    UNITS = 5
    COUNT = 6
    DTYPE = 7


class Number(enum.IntEnum):
    """The columns of ``numbers``."""

    A = 0
    B = 1
    LOW = 2
    HIGH = 3


class History(enum.IntEnum):
    """The int64 numbers of a test with a slot, see ``PlannedTest`` and ``SlotTable``.

    Attributes:
        ROWS: Number of the request's rows in the step.
        POSITION: Position of the first.
        PROMPT: Length of the prompt.
        OVER: 0 for a test of each position, 1 over a window, 2 over the prompt.
        LENGTH: Length of the window.
        MEAN: Whether scores are reduced to their mean.
        LATCHES: Whether it holds on anyway.
        SCORES: Address of the slot's scores.
        REDUCED: Address of its reductions.
        HELD: Address of its states.
    """

    ROWS = 0
    POSITION = 1
    PROMPT = 2
    OVER = 3
    LENGTH = 4
    MEAN = 5
    LATCHES = 6
    SCORES = 7
    REDUCED = 8
    HELD = 9


NOT: Final = -1
AND: Final = -2
OR: Final = -3
"""Operators of JOIN's programs."""

FLOAT32: Final = 0
FLOAT16: Final = 1
BFLOAT16: Final = 2
INT32: Final = 3
INT64: Final = 4
DTYPE_CODES: Final = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.int32: INT32,
    torch.int64: INT64,
}

Words = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]


class Instructions(NamedTuple):
    """Instructions: ``words`` ``[…, 8]`` and ``numbers`` ``[…, 4]``."""

    words: Words
    numbers: Numbers

    @classmethod
    def blank(cls, count: int, code: Code) -> Instructions:
        """Return equal ones of which only the code is set, ``count`` in number."""
        words = np.zeros((count, len(Word)), np.int64)
        words[:, Word.CODE] = code
        return cls(words, np.zeros((count, len(Number)), np.float32))

    def select(self, places: Sequence[int]) -> Instructions:
        """Return some of them."""
        if len(places) == len(self.words):
            return self
        index = np.asarray(places)
        return Instructions(self.words[index], self.numbers[index])


Execute = Callable[[int, int, torch.Tensor, torch.Tensor | None], None]
"""Runs programs, from one to before another, on a site's value in two tensors."""

Executor = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Execute]
"""Returns what runs programs of a table, which is in the memory of the model's device.

Args:
    rows: The row of each program, ``[programs]``; no row twice among those that run together.
    bounds: First instruction of each program, and the end of the last, ``[programs + 1]``.
    words: The words of all instructions.
    numbers: Their numbers.
"""


def layout(value: torch.Tensor) -> tuple[int, int, int, int]:
    """Return where the rows of a value are: address, bytes from row to row, numbers between units, dtype.

    Raises:
        InterventionError: ``intervention_failed``: instructions know no such dtype.
    """
    if value.dtype not in DTYPE_CODES:
        raise InterventionError(
            "intervention_failed", f"the value is in {value.dtype}, which is not supported"
        )
    return value.data_ptr(), value.stride(0) * value.itemsize, value.stride(1), DTYPE_CODES[value.dtype]
