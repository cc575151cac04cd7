"""Executes instructions on a CPU, see ``instructions``: compiled by numba when a worker loads its model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import numba
import numpy as np
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic

from nnsight_engine.plans.step.instructions import Execute, Number, Word, layout

# Numbers of this file: numba's cache is valid for as long as the file is the same, whatever others become.
_ADD, _NORM_MATCH, _PROJECT, _SUBSPACE, _SET, _READ, _DOT, _SCORE, _TEST, _JOIN = range(10)
_DISTANCE, _MLP, _HISTORY, _CHANGE, _MEAN = range(10, 15)
_CODE, _OPERAND, _OUT, _GATE, _OVERFLOW, _UNITS, _COUNT, _DTYPE = range(8)
_A, _B, _LOW, _HIGH = range(4)
_FLOAT32, _FLOAT16, _BFLOAT16, _INT32, _INT64 = range(5)
_NOT, _AND, _OR = -1, -2, -3
_ROWS, _POSITION, _PROMPT, _OVER, _LENGTH, _TAKES_MEAN, _LATCHES, _SCORES, _REDUCED, _HELD = range(10)
_SIGN: Final = np.uint32(0x80000000)
_INFINITE: Final = np.uint32(0x7F800000)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function) -> _Function:
    """Compile a function at its first call, or load it from numba's cache, if a folder for it can be written.

    Sums may be taken in any order; infinities and NaNs keep their meaning.
    """
    compiler = partial(numba.njit, nogil=True, fastmath={"reassoc", "contract"}, error_model="numpy")
    try:
        made: _Function = compiler(cache=True)(function)
    except RuntimeError:
        made = compiler()(function)
    return made


@intrinsic  # type: ignore[untyped-decorator] # numba has no types
def _pointer(_context: Any, address: Any) -> Any:
    """Return an address as a pointer, inside compiled functions; ``generate`` emits LLVM's code."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@_compiled
def _load(address: int, stride: int, code: int, out: Any, bits: Any) -> None:
    """Fill ``out`` with a row, of the dtype ``code``, as float32; ``bits`` are the same memory as uint32."""
    width = len(out)
    if code == _FLOAT32:
        floats = numba.carray(_pointer(address), width * stride, np.float32)
        if stride == 1:
            for i in range(width):
                out[i] = floats[i]
        else:
            for i in range(width):
                out[i] = floats[i * stride]
    elif code == _BFLOAT16:
        halves = numba.carray(_pointer(address), width * stride, np.uint16)
        if stride == 1:
            for i in range(width):
                bits[i] = np.uint32(halves[i]) << np.uint32(16)
        else:
            for i in range(width):
                bits[i] = np.uint32(halves[i * stride]) << np.uint32(16)
    elif code == _FLOAT16:
        halves = numba.carray(_pointer(address), width * stride, np.uint16)
        for i in range(width):
            half = np.uint32(halves[i * stride])
            magnitude = (half & np.uint32(0x7FFF)) << np.uint32(13)
            exponent = magnitude & np.uint32(0x0F800000)
            bits[i] = magnitude + np.uint32(0x38000000)
            if exponent == np.uint32(0x0F800000):
                bits[i] = magnitude + np.uint32(0x70000000)
            elif exponent == 0:
                bits[i] = magnitude + np.uint32(0x38800000)
                out[i] -= np.float32(6.103515625e-05)
            bits[i] |= (half & np.uint32(0x8000)) << np.uint32(16)
    elif code == _INT32:
        ints = numba.carray(_pointer(address), width * stride, np.int32)
        for i in range(width):
            out[i] = np.float32(ints[i * stride])
    else:
        longs = numba.carray(_pointer(address), width * stride, np.int64)
        for i in range(width):
            out[i] = np.float32(longs[i * stride])


@_compiled
def _round(values: Any, bits: Any, code: int) -> None:
    """Round float32 values to a dtype, to even at ties, in place; ``bits`` are the same memory as uint32."""
    if code == _BFLOAT16:
        for i in range(len(values)):
            magnitude = bits[i]
            is_nan = (magnitude & ~_SIGN) > _INFINITE
            rounded = magnitude + np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & np.uint32(1))
            bits[i] = ((magnitude | np.uint32(0x400000)) if is_nan else rounded) & np.uint32(0xFFFF0000)
    elif code == _FLOAT16:
        for i in range(len(values)):
            sign, magnitude = bits[i] & _SIGN, bits[i] & ~_SIGN
            if magnitude > _INFINITE:
                magnitude |= np.uint32(0x400000)
            elif magnitude >= np.uint32(0x477FF000):
                magnitude = _INFINITE
            elif magnitude < np.uint32(0x38800000):
                bits[i] = magnitude
                values[i] = (values[i] + np.float32(0.5)) - np.float32(0.5)
                magnitude = bits[i]
            else:
                magnitude = (
                    magnitude + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))
                ) & np.uint32(0xFFFFE000)
            bits[i] = magnitude | sign


@_compiled
def _store(values: Any, bits: Any, address: int, stride: int, code: int) -> None:
    """Write values that ``_round`` has rounded to a row in the dtype ``code``; ``stride`` counts numbers."""
    width = len(values)
    if code == _FLOAT32:
        floats = numba.carray(_pointer(address), width * stride, np.float32)
        if stride == 1:
            for i in range(width):
                floats[i] = values[i]
        else:
            for i in range(width):
                floats[i * stride] = values[i]
    elif code == _BFLOAT16:
        halves = numba.carray(_pointer(address), width * stride, np.uint16)
        if stride == 1:
            for i in range(width):
                halves[i] = np.uint16(bits[i] >> np.uint32(16))
        else:
            for i in range(width):
                halves[i * stride] = np.uint16(bits[i] >> np.uint32(16))
    elif code == _FLOAT16:
        halves = numba.carray(_pointer(address), width * stride, np.uint16)
        for i in range(width):
            sign, magnitude = (bits[i] & _SIGN) >> np.uint32(16), bits[i] & ~_SIGN
            if magnitude > _INFINITE:
                half = np.uint32(0x7E00)
            elif magnitude == _INFINITE:
                half = np.uint32(0x7C00)
            elif magnitude < np.uint32(0x38800000):
                half = np.uint32(np.abs(values[i]) * np.float32(16777216.0))
            else:
                half = (magnitude - np.uint32(0x38000000)) >> np.uint32(13)
            halves[i * stride] = np.uint16(half | sign)
    elif code == _INT32:
        ints = numba.carray(_pointer(address), width * stride, np.int32)
        for i in range(width):
            ints[i * stride] = np.int32(values[i])
    else:
        longs = numba.carray(_pointer(address), width * stride, np.int64)
        for i in range(width):
            longs[i * stride] = np.int64(values[i])


@_compiled
def _byte(address: int) -> Any:
    return numba.carray(_pointer(address), 1, np.uint8)


@_compiled
def _score(words: Any, numbers: Any, row: int) -> Any:
    """Return the score of one of the instruction's rows: the link of the sum of its parts and the bias."""
    parts = numba.carray(_pointer(words[_OPERAND] + row * words[_COUNT] * 4), words[_COUNT], np.float32)
    sums = np.float32(0)
    for i in range(words[_COUNT]):
        sums += parts[i]
    total = sums + numbers[_A]
    if words[_DTYPE] == 1:
        total = np.float32(1) / (np.float32(1) + np.exp(-total))
    return total


@_compiled
def _joined(words: Any) -> bool:
    """Return the value of a postfix program: the top of its stack is the lowest bit."""
    if words[_UNITS] != 0 and _byte(words[_UNITS])[0] == 0:
        return False
    program = numba.carray(_pointer(words[_OPERAND]), words[_COUNT], np.int64)
    stack = 0
    for i in range(words[_COUNT]):
        step = program[i]
        if step >= 0:
            stack = (stack << 1) | (1 if _byte(step)[0] != 0 else 0)
        elif step == _NOT:
            stack ^= 1
        else:
            top, below, rest = stack & 1, (stack >> 1) & 1, (stack >> 2) << 1
            stack = rest | ((top & below) if step == _AND else (top | below))
    return (stack & 1) == 1


@_compiled
def _test_history(words: Any, numbers: Any) -> None:
    """Execute HISTORY, see ``Code``: the states of a test at all rows of a request, in their order."""
    history = numba.carray(_pointer(words[_UNITS]), 10, np.int64)
    num_rows, start = history[_ROWS], history[_POSITION]
    stop = start + num_rows
    scores = numba.carray(_pointer(history[_SCORES]), stop, np.float32)
    reduced = numba.carray(_pointer(history[_REDUCED]), stop, np.float32)
    held = numba.carray(_pointer(history[_HELD]), stop, np.uint8)
    out = numba.carray(_pointer(words[_OUT]), num_rows, np.uint8)
    takes_mean = history[_TAKES_MEAN] != 0
    neutral = np.float32(0) if takes_mean else np.float32(-np.inf)
    is_held = start > 0 and held[start - 1] != 0
    running = reduced[start - 1] if start > 0 else neutral
    for row in range(num_rows):
        position = start + row
        value = _score(words, numbers, row) * numbers[_B]
        if history[_OVER] == 1:
            scores[position] = value
            first = max(position - history[_LENGTH] + 1, 0)
            value = neutral
            for i in range(first, position + 1):
                value = value + scores[i] if takes_mean else _larger(value, scores[i])
            if takes_mean:
                value /= np.float32(position - first + 1)
        elif history[_OVER] == 2:
            if position < history[_PROMPT]:
                running = running + value if takes_mean else _larger(running, value)
            reduced[position] = running
            value = running / np.float32(min(position + 1, history[_PROMPT])) if takes_mean else running
        stays = history[_LATCHES] != 0 or value > numbers[_HIGH]
        is_held = value > numbers[_LOW] or (stays and is_held)
        held[position] = out[row] = is_held


@_compiled
def _larger(first: Any, second: Any) -> Any:
    """Return the larger of two numbers; NaN if one is NaN."""
    return second if second > first or np.isnan(second) else first


@_compiled
def _part(words: Any, x: Any) -> Any:
    """Return the number that DISTANCE or MLP makes of the value ``x``."""
    width = len(x)
    if words[_CODE] == _DISTANCE:
        mean = numba.carray(_pointer(words[_OPERAND]), width, np.float32)
        scale = numba.carray(_pointer(words[_UNITS]), width, np.float32)
        squares = np.float32(0)
        for i in range(width):
            off = (x[i] - mean[i]) * scale[i]
            squares += off * off
        return -np.sqrt(squares)
    count = words[_COUNT]
    hidden = numba.carray(_pointer(words[_OPERAND]), count * width, np.float32)
    output = numba.carray(_pointer(words[_UNITS]), 2 * count, np.float32)
    total = np.float32(0)
    for k in range(count):
        along = output[k]
        for i in range(width):
            along += x[i] * hidden[k * width + i]
        total += max(along, np.float32(0)) * output[count + k]
    return total


@_compiled
def _change(words: Any, numbers: Any, x: Any, change: Any) -> None:
    """Fill ``change`` with what NORM_MATCH, PROJECT, SUBSPACE or CHANGE adds to the value ``x``."""
    width = len(x)
    code = words[_CODE]
    if code == _SUBSPACE:
        stride = words[_DTYPE]
        basis = numba.carray(_pointer(words[_OPERAND]), words[_COUNT] * stride, np.float32)
        change[:] = 0
        for k in range(words[_COUNT]):
            along = np.float32(0)
            for i in range(width):
                along += x[i] * basis[k * stride + i]
            along *= -numbers[_B]
            for i in range(width):
                change[i] += along * basis[k * stride + i]
        return
    operand = numba.carray(_pointer(words[_OPERAND]), width, np.float32)
    if code == _CHANGE:
        change[:] = operand
        return
    if code == _NORM_MATCH:
        squares = np.float32(0)
        for i in range(width):
            squares += x[i] * x[i]
        factor = np.sqrt(squares)
    else:
        along = np.float32(0)
        for i in range(width):
            along += x[i] * operand[i]
        factor = numbers[_A] - numbers[_B] * along
        # As ``torch.clamp``: at least low, then at most high.
        factor = min(max(factor, numbers[_LOW] - along), numbers[_HIGH] - along)
    for i in range(width):
        change[i] = factor * operand[i]


@_compiled
def _is_beyond(rounded: Any, exact: Any) -> bool:
    """Return whether rounding has made a finite number infinite."""
    for i in range(len(rounded)):
        if np.isinf(rounded[i]) and np.isfinite(exact[i]):
            return True
    return False


@_compiled
def _is_in_place(stride: int, code: int) -> bool:
    """Return whether a row can be used in the model's own memory, without ``_load`` and ``_store``."""
    return bool(stride == 1 and code == _FLOAT32)


@_compiled
def _run(
    first: int,
    stop: int,
    rows: Any,
    bounds: Any,
    words: Any,
    numbers: Any,
    width: int,
    hidden: int,
    hidden_row: int,
    hidden_stride: int,
    hidden_code: int,
    is_single: bool,  # noqa: FBT001 - numba takes arguments by place
    residual: int,
    residual_row: int,
    residual_stride: int,
    residual_code: int,
) -> None:
    """Run programs ``first`` to ``stop``; ``hidden_row`` and ``residual_row`` are the bytes from row to row.

    ``h`` and ``r`` are the row's two parts in float32, ``x`` is their sum, as long as ``is_current``.
    """
    # Memory for one row: h, r, x, a change, and the change before it is rounded
    memory = np.empty((5, width), np.float32)
    x, change, exact = memory[2], memory[3], memory[4]
    all_bits = memory.view(np.uint32)
    h_bits, r_bits, change_bits = all_bits[0], all_bits[1], all_bits[3]
    # Contiguous float32 rows are used where they are.
    has_h, has_r = (
        not _is_in_place(hidden_stride, hidden_code),
        not _is_in_place(residual_stride, residual_code),
    )
    for entry in range(first, stop):
        # Load the row
        row = rows[entry]
        h_address, r_address = hidden + row * hidden_row, residual + row * residual_row
        h = memory[0] if has_h else numba.carray(_pointer(h_address), width, np.float32)
        if has_h:
            _load(h_address, hidden_stride, hidden_code, h, h_bits)
        r = memory[1] if has_r else numba.carray(_pointer(r_address), width, np.float32)
        if has_r and not is_single:
            _load(r_address, residual_stride, residual_code, r, r_bits)
        writes_hidden = writes_residual = False
        is_current = False
        # Execute its instructions; a closed gate leaves one out
        for number in range(bounds[entry], bounds[entry + 1]):
            instruction, amounts = words[number], numbers[number]
            if instruction[_GATE] != 0 and _byte(instruction[_GATE])[0] == 0:
                continue
            code = instruction[_CODE]
            # Writes of a given value
            if code == _ADD:
                if instruction[_DTYPE] == _FLOAT32:
                    operand = numba.carray(_pointer(instruction[_OPERAND]), width, np.float32)
                    for i in range(width):
                        h[i] += operand[i]
                else:
                    _load(instruction[_OPERAND], 1, instruction[_DTYPE], change, change_bits)
                    for i in range(width):
                        h[i] += change[i]
                if has_h:
                    _round(h, h_bits, hidden_code)
                writes_hidden, is_current = True, False
                continue
            if code == _SET:
                _load(instruction[_OPERAND], 1, instruction[_DTYPE], change, change_bits)
                _round(change, change_bits, hidden_code)
                if instruction[_COUNT] == 0:
                    h[:] = change
                    if not is_single:
                        r[:] = 0
                else:
                    units = numba.carray(_pointer(instruction[_UNITS]), instruction[_COUNT], np.int64)
                    for unit in units:
                        h[unit] = change[unit]
                        if not is_single:
                            r[unit] = 0
                writes_hidden = writes_residual = True
                is_current = False
                continue
            # Scores, tests and gates
            if code == _SCORE:
                numba.carray(_pointer(instruction[_OUT]), 1, np.float32)[0] = _score(instruction, amounts, 0)
                continue
            if code == _TEST:
                _byte(instruction[_OUT])[0] = amounts[_B] * _score(instruction, amounts, 0) > amounts[_LOW]
                continue
            if code == _JOIN:
                _byte(instruction[_OUT])[0] = _joined(instruction)
                continue
            if code == _HISTORY:
                _test_history(instruction, amounts)
                continue
            # Mean over other rows
            if code == _MEAN:
                units = numba.carray(_pointer(instruction[_UNITS]), instruction[_COUNT], np.int64)
                mean = numba.carray(_pointer(instruction[_OUT]), width, np.float32)
                mean[:] = 0
                for unit in units:
                    _load(hidden + unit * hidden_row, hidden_stride, hidden_code, change, change_bits)
                    for i in range(width):
                        mean[i] += change[i]
                for unit in units if not is_single else units[:0]:
                    other = residual + unit * residual_row
                    _load(other, residual_stride, residual_code, change, change_bits)
                    for i in range(width):
                        mean[i] += change[i]
                for i in range(width):
                    mean[i] /= np.float32(instruction[_COUNT])
                continue
            # Read in float32, which needs no rounding
            if code == _READ and instruction[_DTYPE] == _FLOAT32 and instruction[_OVERFLOW] == 0:
                out = numba.carray(_pointer(instruction[_OUT]), width, np.float32)
                if is_single:
                    for i in range(width):
                        out[i] = h[i]
                else:
                    for i in range(width):
                        out[i] = h[i] + r[i]
                continue
            # What follows needs the value x
            if not is_current:
                if is_single:
                    for i in range(width):
                        x[i] = h[i]
                else:
                    for i in range(width):
                        x[i] = h[i] + r[i]
                is_current = True
            # Read in another dtype, and reads of scores' parts
            if code == _READ:
                for i in range(width):
                    change[i] = x[i]
                _round(change, change_bits, instruction[_DTYPE])
                if instruction[_OVERFLOW] != 0:
                    _byte(instruction[_OVERFLOW])[0] = _is_beyond(change, x)
                _store(change, change_bits, instruction[_OUT], 1, instruction[_DTYPE])
                continue
            if code == _DOT:
                weights = numba.carray(_pointer(instruction[_OPERAND]), width, np.float32)
                total = np.float32(0)
                for i in range(width):
                    total += x[i] * weights[i]
                numba.carray(_pointer(instruction[_OUT]), 1, np.float32)[0] = total + amounts[_A]
                continue
            if code == _DISTANCE or code == _MLP:  # noqa: SIM109 - numba would make a tuple
                numba.carray(_pointer(instruction[_OUT]), 1, np.float32)[0] = _part(instruction, x)
                continue
            # Changes that depend on x, left out if they exceed the dtype
            _change(instruction, amounts, x, change)
            if instruction[_OVERFLOW] != 0:
                exact[:] = change
            _round(change, change_bits, hidden_code)
            if instruction[_OVERFLOW] != 0 and _is_beyond(change, exact):
                _byte(instruction[_OVERFLOW])[0] = 1
                continue
            for i in range(width):
                h[i] += change[i]
            if has_h:
                _round(h, h_bits, hidden_code)
            writes_hidden, is_current = True, False
        # Write back
        if writes_hidden and has_h:
            _store(h, h_bits, h_address, hidden_stride, hidden_code)
        if writes_residual and has_r and not is_single:
            _store(r, r_bits, r_address, residual_stride, residual_code)


def executor(rows: torch.Tensor, bounds: torch.Tensor, words: torch.Tensor, numbers: torch.Tensor) -> Execute:
    """Return what runs programs of a table, see ``Executor``."""
    entries, entry_bounds, all_words, all_numbers = (
        tensor.numpy() for tensor in (rows, bounds, words, numbers)
    )

    def execute(first: int, stop: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        hidden_layout, residual_layout = layout(hidden), layout(hidden if residual is None else residual)
        width, is_single = hidden.shape[1], residual is None
        _run(
            first,
            stop,
            entries,
            entry_bounds,
            all_words,
            all_numbers,
            width,
            *hidden_layout,
            is_single,
            *residual_layout,
        )

    return execute


def prepare() -> None:
    """Compile what runs programs, or load it: the first time on a machine that takes many seconds."""
    no_rows, bounds = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    words, numbers = torch.empty(0, len(Word), dtype=torch.int64), torch.empty(0, len(Number))
    executor(no_rows, bounds, words, numbers)(0, 0, torch.empty(1, 1), None)
