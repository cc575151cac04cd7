"""Executes instructions on a GPU, see ``instructions``: one Triton program for each row.

An instruction reads and writes the row in memory, in blocks, so that a row of any width has a program.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from nnsight_engine.plans.step.instructions import Execute, Number, Word, layout

_BLOCK: Final = 1024
"""Numbers of a row that are computed at once, at most."""


@triton.jit
def _load(address, offsets, mask, code):
    """Return numbers at an address as float32, 0 outside of the mask; ``code`` is a dtype's."""
    if code == 0:
        loaded = tl.load(address.to(tl.pointer_type(tl.float32)) + offsets, mask, 0.0)
    elif code == 1:
        loaded = tl.load(address.to(tl.pointer_type(tl.float16)) + offsets, mask, 0.0).to(tl.float32)
    elif code == 2:
        loaded = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + offsets, mask, 0.0).to(tl.float32)
    elif code == 3:
        loaded = tl.load(address.to(tl.pointer_type(tl.int32)) + offsets, mask, 0).to(tl.float32)
    else:
        loaded = tl.load(address.to(tl.pointer_type(tl.int64)) + offsets, mask, 0).to(tl.float32)
    return loaded


@triton.jit
def _load_rows(address, rows, offsets, mask, code):
    """Return numbers of several rows, ``[rows, offsets]``; ``rows`` are bytes from the address."""
    starts = address + rows[:, None]
    return _load(starts, offsets[None, :], mask, code)


@triton.jit
def _store(address, offsets, mask, code, values):
    """Write float32 values in the dtype of a code."""
    if code == 0:
        tl.store(address.to(tl.pointer_type(tl.float32)) + offsets, values, mask)
    elif code == 1:
        tl.store(address.to(tl.pointer_type(tl.float16)) + offsets, values.to(tl.float16), mask)
    elif code == 2:
        tl.store(address.to(tl.pointer_type(tl.bfloat16)) + offsets, values.to(tl.bfloat16), mask)
    elif code == 3:
        tl.store(address.to(tl.pointer_type(tl.int32)) + offsets, values.to(tl.int32), mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.int64)) + offsets, values.to(tl.int64), mask)


@triton.jit
def _rounded(values, code):
    """Return float32 values rounded to the dtype of a code."""
    if code == 1:
        rounded = values.to(tl.float16).to(tl.float32)
    elif code == 2:
        rounded = values.to(tl.bfloat16).to(tl.float32)
    else:
        rounded = values
    return rounded


@triton.jit
def _value(hidden, h_stride, h_code, residual, r_stride, r_code, places, mask, HAS_RESIDUAL: tl.constexpr):
    """Return a row's value at some places: ``hidden``, plus ``residual`` if the stream has two tensors."""
    x = _load(hidden, places * h_stride, mask, h_code)
    if HAS_RESIDUAL:
        x += _load(residual, places * r_stride, mask, r_code)
    return x


@triton.jit
def _score(operand, count, link, bias):
    """Return the link (1: sigmoid) of the sum of ``count`` float32 numbers at ``operand`` and the bias."""
    score = tl.zeros([], tl.float32)
    parts = operand.to(tl.pointer_type(tl.float32))
    for part in range(count):
        score += tl.load(parts + part)
    score += bias
    if link == 1:
        score = 1.0 / (1.0 + tl.exp(-score))
    return score


@triton.jit
def _larger(first, second):
    """Return the larger of two numbers; NaN if one is NaN."""
    return tl.where((second > first) | (second != second), second, first)


@triton.jit
def _test_history(operand, out, units, count, link, bias, sign, threshold, keeps, BLOCK: tl.constexpr):
    """Execute HISTORY, see ``Code`` and ``History``: a test's states at all rows of a request, in order."""
    history = units.to(tl.pointer_type(tl.int64))
    num_rows, start, prompt = tl.load(history), tl.load(history + 1), tl.load(history + 2)
    over, length, takes_mean, latches = (
        tl.load(history + 3),
        tl.load(history + 4),
        tl.load(history + 5),
        tl.load(history + 6),
    )
    scores = tl.load(history + 7).to(tl.pointer_type(tl.float32))
    reduced = tl.load(history + 8).to(tl.pointer_type(tl.float32))
    held = tl.load(history + 9).to(tl.pointer_type(tl.uint8))
    states = out.to(tl.pointer_type(tl.uint8))
    neutral = tl.where(takes_mean != 0, 0.0, float("-inf"))
    before = tl.maximum(start - 1, 0)
    is_held = (tl.load(held + before) != 0) & (start > 0)
    running = tl.where(start > 0, tl.load(reduced + before), neutral)
    for row in range(num_rows):
        position = start + row
        value = _score(operand + row * count * 4, count, link, bias) * sign
        if over == 1:
            tl.store(scores + position, value)
            tl.debug_barrier()
            first = tl.maximum(position - length + 1, 0)
            value = neutral
            for offset in range(0, position - first + 1, BLOCK):
                places = first + offset + tl.arange(0, BLOCK)
                some = tl.load(scores + places, places <= position, neutral)
                if takes_mean != 0:
                    value += tl.sum(some, 0)
                else:
                    is_broken = tl.max((some != some).to(tl.int32), 0) != 0
                    value = _larger(value, tl.where(is_broken, float("nan"), tl.max(some, 0)))
            if takes_mean != 0:
                value = value / (position - first + 1).to(tl.float32)
        elif over == 2:
            if position < prompt:
                running = tl.where(takes_mean != 0, running + value, _larger(running, value))
            tl.store(reduced + position, running)
            value = running
            if takes_mean != 0:
                value = running / tl.minimum(position + 1, prompt).to(tl.float32)
        is_held = (value > threshold) | (((latches != 0) | (value > keeps)) & is_held)
        tl.store(held + position, is_held.to(tl.uint8))
        tl.store(states + row, is_held.to(tl.uint8))


@triton.jit(do_not_specialize=["first", "width", "h_row", "h_code", "r_row", "r_code"])
def _run(
    rows, bounds, words, numbers, first, width,
    hidden, h_row, h_stride, h_code,
    residual, r_row, r_stride, r_code,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run one row's program; addresses are bytes, ``h_row`` and ``r_row`` the bytes from row to row."""
    # The row
    entry = first + tl.program_id(0)
    row = tl.load(rows + entry)
    first_hidden, first_residual = hidden, residual
    hidden += row * h_row
    residual += row * r_row
    # Its instructions: words and numbers in the order of ``Word`` and ``Number``
    for number in range(tl.load(bounds + entry), tl.load(bounds + entry + 1)):
        instruction, amounts = words + number * 8, numbers + number * 4
        code, operand, out = tl.load(instruction), tl.load(instruction + 1), tl.load(instruction + 2)
        gate, overflow, units = tl.load(instruction + 3), tl.load(instruction + 4), tl.load(instruction + 5)
        count, dtype = tl.load(instruction + 6), tl.load(instruction + 7)
        a, b, low, high = tl.load(amounts), tl.load(amounts + 1), tl.load(amounts + 2), tl.load(amounts + 3)
        # A closed gate leaves the instruction out
        is_open = True
        if gate != 0:
            is_open = tl.load(gate.to(tl.pointer_type(tl.uint8))) != 0
        lanes = tl.arange(0, BLOCK)
        if is_open and code == 0:  # ADD
            for start in range(0, width, BLOCK):
                places = (start + lanes).to(tl.int64)
                mask = places < width
                h = _load(hidden, places * h_stride, mask, h_code)
                h += _load(operand, places, mask, dtype)
                _store(hidden, places * h_stride, mask, h_code, h)
        elif is_open and code == 4:  # SET
            num_units = tl.where(count == 0, width, count)
            for start in range(0, num_units, BLOCK):
                places = (start + lanes).to(tl.int64)
                mask = places < num_units
                if count != 0:
                    places = tl.load(units.to(tl.pointer_type(tl.int64)) + places, mask, 0)
                _store(hidden, places * h_stride, mask, h_code, _load(operand, places, mask, dtype))
                if HAS_RESIDUAL:
                    _store(residual, places * r_stride, mask, r_code, tl.zeros([BLOCK], tl.float32))
        elif is_open and code == 5:  # READ
            beyond = tl.zeros([BLOCK], tl.int32)
            for start in range(0, width, BLOCK):
                places = (start + lanes).to(tl.int64)
                mask = places < width
                x = _value(hidden, h_stride, h_code, residual, r_stride, r_code, places, mask, HAS_RESIDUAL)
                rounded = _rounded(x, dtype)
                beyond |= ((tl.abs(rounded) == float("inf")) & (tl.abs(x) < float("inf"))).to(tl.int32)
                _store(out, places, mask, dtype, x)
            if overflow != 0:
                tl.store(overflow.to(tl.pointer_type(tl.uint8)), tl.max(beyond, 0).to(tl.uint8))
        elif is_open and code == 6:  # DOT
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(0, width, BLOCK):
                places = (start + lanes).to(tl.int64)
                mask = places < width
                x = _value(hidden, h_stride, h_code, residual, r_stride, r_code, places, mask, HAS_RESIDUAL)
                total += x * _load(operand, places, mask, 0)
            tl.store(out.to(tl.pointer_type(tl.float32)), tl.sum(total, 0) + a)
        elif is_open and (code == 7 or code == 8):  # SCORE, TEST
            score = _score(operand, count, dtype, a)
            if code == 7:
                tl.store(out.to(tl.pointer_type(tl.float32)), score)
            else:
                tl.store(out.to(tl.pointer_type(tl.uint8)), (b * score > low).to(tl.uint8))
        elif is_open and code == 9:  # JOIN: the top of the stack is the lowest bit
            stack = tl.zeros([], tl.int64)
            program = operand.to(tl.pointer_type(tl.int64))
            for place in range(count):
                step = tl.load(program + place)
                if step >= 0:
                    state = tl.load(step.to(tl.pointer_type(tl.uint8))) != 0
                    stack = (stack << 1) | state.to(tl.int64)
                elif step == -1:
                    stack = stack ^ 1
                else:
                    top, below, rest = stack & 1, (stack >> 1) & 1, (stack >> 2) << 1
                    stack = rest | tl.where(step == -2, top & below, top | below)
            is_named = True
            if units != 0:
                is_named = tl.load(units.to(tl.pointer_type(tl.uint8))) != 0
            tl.store(out.to(tl.pointer_type(tl.uint8)), ((stack & 1) * is_named).to(tl.uint8))
        elif is_open and code == 10:  # DISTANCE
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(0, width, BLOCK):
                places = (start + lanes).to(tl.int64)
                mask = places < width
                x = _value(hidden, h_stride, h_code, residual, r_stride, r_code, places, mask, HAS_RESIDUAL)
                off = (x - _load(operand, places, mask, 0)) * _load(units, places, mask, 0)
                total += off * off
            tl.store(out.to(tl.pointer_type(tl.float32)), -tl.sqrt(tl.sum(total, 0)))
        elif is_open and code == 11:  # MLP
            output = units.to(tl.pointer_type(tl.float32))
            score = tl.zeros([], tl.float32)
            for first_unit in range(0, count, 8):
                block_units = first_unit + tl.arange(0, 8)
                is_unit = block_units < count
                along = tl.load(output + block_units, is_unit, 0.0)
                for start in range(0, width, BLOCK):
                    places = (start + lanes).to(tl.int64)
                    mask = places < width
                    x = _value(
                        hidden, h_stride, h_code, residual, r_stride, r_code, places, mask, HAS_RESIDUAL
                    )
                    of_units = block_units[:, None] * width + places[None, :]
                    weights = _load(operand, of_units, is_unit[:, None] & mask[None, :], 0)
                    along += tl.sum(x[None, :] * weights, 1)
                along = tl.maximum(along, 0.0) * tl.load(output + count + block_units, is_unit, 0.0)
                score += tl.sum(along, 0)
            tl.store(out.to(tl.pointer_type(tl.float32)), score)
        elif is_open and code == 14:  # MEAN
            of_rows = units.to(tl.pointer_type(tl.int64))
            for start in range(0, width, BLOCK):
                places = (start + lanes).to(tl.int64)
                mask = places < width
                total = tl.zeros([BLOCK], tl.float32)
                for first_row in range(0, count, 8):
                    own_rows = first_row + tl.arange(0, 8)
                    others = tl.load(of_rows + own_rows, own_rows < count, 0)
                    both = (own_rows < count)[:, None] & mask[None, :]
                    at = _load_rows(first_hidden, others * h_row, places * h_stride, both, h_code)
                    if HAS_RESIDUAL:
                        at += _load_rows(first_residual, others * r_row, places * r_stride, both, r_code)
                    total += tl.sum(at, 0)
                _store(out, places, mask, 0, total / count.to(tl.float32))
        elif is_open and code == 12:  # HISTORY
            _test_history(operand, out, units, count, dtype, a, b, low, high, BLOCK)
        elif is_open:  # NORM_MATCH, PROJECT, SUBSPACE, CHANGE
            num_vectors = tl.where(code == 3, count, 1)
            stride = tl.where(code == 3, dtype, 0)
            # The factor of each vector, by a sum over the row, to memory at ``out``
            for vector in range(tl.where(code == 13, 0, num_vectors)):
                total = tl.zeros([BLOCK], tl.float32)
                for start in range(0, width, BLOCK):
                    places = (start + lanes).to(tl.int64)
                    mask = places < width
                    x = _value(
                        hidden, h_stride, h_code, residual, r_stride, r_code, places, mask, HAS_RESIDUAL
                    )
                    other = x
                    if code != 1:
                        other = _load(operand, vector * stride + places, mask, 0)
                    total += x * other
                along = tl.sum(total, 0)
                if code == 1:
                    factor = tl.sqrt(along)
                elif code == 2:
                    factor = tl.minimum(tl.maximum(a - b * along, low - along), high - along)
                else:
                    factor = -b * along
                tl.store(out.to(tl.pointer_type(tl.float32)) + vector, factor)
            tl.debug_barrier()
            # First, if there is a flag, see whether the change exceeds the dtype; then apply it if not
            beyond = tl.zeros([BLOCK], tl.int32)
            for is_applied in range(2):
                is_due = overflow != 0
                if is_applied == 1:
                    is_due = tl.max(beyond, 0) == 0
                if is_due:
                    for start in range(0, width, BLOCK):
                        places = (start + lanes).to(tl.int64)
                        mask = places < width
                        change = tl.zeros([BLOCK], tl.float32)
                        for vector in range(num_vectors):
                            factor = tl.full([], 1.0, tl.float32)
                            if code != 13:
                                factor = tl.load(out.to(tl.pointer_type(tl.float32)) + vector)
                            change += factor * _load(operand, vector * stride + places, mask, 0)
                        rounded = _rounded(change, h_code)
                        if is_applied == 0:
                            is_beyond = (tl.abs(rounded) == float("inf")) & (tl.abs(change) < float("inf"))
                            beyond |= is_beyond.to(tl.int32)
                        else:
                            h = _load(hidden, places * h_stride, mask, h_code)
                            _store(hidden, places * h_stride, mask, h_code, h + rounded)
            if overflow != 0:
                if tl.max(beyond, 0) != 0:
                    tl.store(overflow.to(tl.pointer_type(tl.uint8)), 1)
        tl.debug_barrier()


def executor(rows: torch.Tensor, bounds: torch.Tensor, words: torch.Tensor, numbers: torch.Tensor) -> Execute:
    """Return what runs programs, see ``Executor``; within a graph's capture it only launches its kernel."""

    def execute(first: int, stop: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        width = hidden.shape[1]
        _run[(stop - first,)](
            rows,
            bounds,
            words,
            numbers,
            first,
            width,
            *layout(hidden),
            *layout(hidden if residual is None else residual),
            HAS_RESIDUAL=residual is not None,
            BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        )

    return execute


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    """Compile what runs programs on values of the model's dtype, or load it, rather than in a step."""
    value = torch.zeros(1, _BLOCK, dtype=dtype, device=device)
    row, bounds = (torch.zeros(size, dtype=torch.int64, device=device) for size in (1, 2))
    words = torch.empty(0, len(Word), dtype=torch.int64, device=device)
    execute = executor(row, bounds, words, torch.empty(0, len(Number), device=device))
    for residual in (None, value.clone()):
        execute(0, 1, value, residual)
