"""The names that compiled code uses: the globals to send with it, and possible attributes of modules."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType

_READS_GLOBAL = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
)
_RUNS_AT_ONCE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "__annotate__"})
"""Names of nested code that runs together with the enclosing code. From Python 3.14 on a class's
annotations are evaluated lazily, but a reader with an older Python evaluates them immediately."""
_TYPE_PARAMETERS = "<generic parameters of "
"""Prefix of the name of the code around a generic class or function, from 3.12 on; it also runs at once."""


def global_names(code: CodeType, *, at_once: bool = False) -> list[str]:
    """Return the global names that code uses; ``at_once`` leaves out functions that run later or never."""
    found: dict[str, None] = {}
    for one in nested_codes(code, at_once=at_once):
        for instruction in dis.get_instructions(one):
            if instruction.opname in _READS_GLOBAL:
                found[str(instruction.argval)] = None
    return list(found)


def mentioned_in(code: CodeType) -> set[str]:
    """Return every name and string constant of the code; each may be the name of a module attribute."""
    found: set[str] = set()
    for one in nested_codes(code):
        found.update(one.co_names)
        found.update(constant for constant in one.co_consts if isinstance(constant, str))
    return found


def nested_codes(code: CodeType, *, at_once: bool = False) -> Iterator[CodeType]:
    waiting = [code]
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(
            constant
            for constant in one.co_consts
            if isinstance(constant, CodeType) and (not at_once or _runs_at_once(constant.co_name))
        )


def _runs_at_once(name: str) -> bool:
    return name in _RUNS_AT_ONCE or name.startswith(_TYPE_PARAMETERS)


def nested_code(code: CodeType, name: str) -> CodeType:
    """Return the code object called ``name`` that is nested in another, or raise a ``SyntaxError``."""
    waiting = [code]
    while waiting:
        found = [constant for one in waiting for constant in one.co_consts if isinstance(constant, CodeType)]
        for one in found:
            if one.co_name == name:
                return one
        waiting = found
    raise SyntaxError(f"the text does not define {name}")
