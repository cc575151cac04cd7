"""Support for ``help(model.output)`` outside a trace, where reading yields the property, not a value."""

from __future__ import annotations

import dis
from types import FrameType

_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL"})
_BETWEEN = frozenset({"PRECALL", "CACHE", "KW_NAMES"})


def is_for_help(frame: FrameType) -> bool:
    instructions = list(dis.get_instructions(frame.f_code))
    now = next((at for at, one in enumerate(instructions) if one.offset >= frame.f_lasti), None)
    if now is None:
        return False
    after = now + 1
    while after < len(instructions) and instructions[after].opname in _BETWEEN:
        after += 1
    if after == len(instructions) or instructions[after].opname != "CALL" or instructions[after].arg != 1:
        return False
    place = instructions[after].positions
    return any(
        one.opname in _LOADS
        and one.argval == "help"
        and one.positions is not None
        and place is not None
        and (one.positions.lineno, one.positions.col_offset) == (place.lineno, place.col_offset)
        for one in instructions[:now]
    )
