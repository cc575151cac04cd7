"""Warnings about ``block.output[0]`` in old scripts, where it now means the first row of a tensor.

Decoder blocks of transformers return one tensor, ``[rows, tokens, width]``; they used to return tuples. The
intended meaning cannot be determined, so the index keeps its plain meaning and each such line is warned about
once. The bytecode shows the use: the value is indexed, unpacked, or bound to a name that is indexed later.
"""

from __future__ import annotations

import dis
import functools
import warnings
from types import CodeType, FrameType
from typing import Any, Final

from nnsight_engine.core.read_listener import ReadListener

_BLOCK: Final = "GradientCheckpointingLayer"
"""The base class of all blocks of transformers."""

_NUM_DIMENSIONS: Final = 3
_IGNORED_OPERATIONS: Final = frozenset({"CACHE", "PRECALL", "COPY", "SWAP", "RESUME", "NOP", "EXTENDED_ARG"})
_INDEXES: Final = frozenset({"BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"})
_UNPACKS: Final = frozenset({"UNPACK_SEQUENCE", "UNPACK_EX"})
_VALUE_PRESERVING: Final = frozenset({"save", "clone", "detach", "cpu"})
"""Methods whose result is indexed as the value itself would be."""


def listen() -> None:
    ReadListener.listener = _check


def stop_listening() -> None:
    ReadListener.listener = None


def _check(frame: FrameType, holder: Any, name: str, value: Any) -> None:
    """Warn at the line that takes the first item of a block's output; called for each value that is read."""
    module = getattr(holder, "_module", None)
    is_block = any(base.__name__ == _BLOCK for base in type(module).__mro__)
    if name != "output" or not is_block or getattr(value, "ndim", None) != _NUM_DIMENSIONS:
        return
    line, bound_to = first_taken(frame.f_code, frame.f_lasti)
    surroundings = _frame_around(holder)
    if line is None and bound_to is not None and surroundings is not None:
        line = indexed_by_name(surroundings.f_code, bound_to)
    if line is not None:
        warnings.warn_explicit(
            f"`output[0]` of {holder.path} is its first row: {type(module).__name__} returns one tensor, "
            "[rows, tokens, width], and no longer a tuple that begins with it. Write `output` for what "
            "`output[0]` was in older scripts, and `output[:1]` if the first row is meant.",
            UserWarning,
            frame.f_code.co_filename,
            line,
            registry=frame.f_globals.setdefault("__warningregistry__", {}),
        )


def _frame_around(holder: Any) -> FrameType | None:
    """Return the frame that opened the trace, in which saved values are used."""
    frame: FrameType | None = getattr(holder.interleaver.current.info, "frame", None)
    return frame


@functools.lru_cache(maxsize=4096)
def first_taken(code: CodeType, offset: int) -> tuple[int | None, str | None]:
    """Return the line that takes the first item of the value read at ``offset``, and the name it gets."""
    instructions = _instructions(code)
    after = [number for number, instruction in enumerate(instructions) if instruction.offset > offset]
    if not after:
        return None, None
    number = _past_methods(instructions, after[0])
    if _takes_first(instructions, number):
        return _line(instructions, number), None
    if (
        number < len(instructions)
        and instructions[number].opname.startswith("STORE_")
        and instructions[number].opname != "STORE_ATTR"
    ):
        name = str(instructions[number].argval)
        return indexed_by_name(code, name), name
    return None, None


@functools.lru_cache(maxsize=4096)
def indexed_by_name(code: CodeType, name: str) -> int | None:
    """Return the first line that takes the first item of a variable's value; None if none does."""
    instructions = _instructions(code)
    for number, instruction in enumerate(instructions):
        is_read = instruction.opname.startswith("LOAD_") and instruction.argval == name
        if is_read and _takes_first(instructions, _past_methods(instructions, number + 1)):
            return _line(instructions, number)
    return None


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [
        instruction
        for instruction in dis.get_instructions(code)
        if instruction.opname not in _IGNORED_OPERATIONS
    ]


def _past_methods(instructions: list[dis.Instruction], number: int) -> int:
    """Skip calls without arguments of methods that return an equal value."""
    while (
        number + 1 < len(instructions)
        and instructions[number].argval in _VALUE_PRESERVING
        and instructions[number + 1].opname == "CALL"
    ):
        number += 2
    return number


def _takes_first(instructions: list[dis.Instruction], number: int) -> bool:
    """Return whether the instructions from ``number`` on index a value with 0, or unpack it."""
    if number + 1 >= len(instructions):
        return False
    instruction, following = instructions[number], instructions[number + 1]
    is_zero = (
        instruction.opname == "LOAD_CONST" and type(instruction.argval) is int and instruction.argval == 0
    )
    return (is_zero and following.opname in _INDEXES) or instruction.opname in _UNPACKS


def _line(instructions: list[dis.Instruction], number: int) -> int | None:
    positions = instructions[number].positions
    return positions.lineno if positions is not None else None
