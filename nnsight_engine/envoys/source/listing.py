"""Printed form of a rewritten function: the whole text with its operations, or one operation in context."""

from __future__ import annotations

from typing import Final

from nnsight_engine.envoys.source.operations import Operation, Rewritten

LINES_BEFORE: Final = 5
"""Number of lines shown above an operation's line."""

LINES_AFTER: Final = 3
"""Number of lines shown below it."""


def format_source(rewritten: Rewritten) -> str:
    """Return the function's text with the names of operations at their lines.

    A line's first operation is shown beside its text; further ones have rows with a ``+`` for the number::

        self_c_attn_0 -> 24     query, key, value = self.c_attn(hidden).split(self.size, dim=2)
        split_0       ->  +
                         25
    """
    lines = rewritten.source.split("\n")
    names: dict[int, list[str]] = {}
    for operation in rewritten.operations:
        names.setdefault(operation.line, []).append(operation.name)
    name_width = max((len(operation.name) for operation in rewritten.operations), default=0)
    number_width = len(str(len(lines) - 1))
    rows: list[str] = []
    for number, line in enumerate(lines):
        first, *others = names.get(number, [""])
        arrow = "->" if first else "  "
        rows.append(f"{first:<{name_width}} {arrow} {number:>{number_width}} {line}")
        rows.extend(f"{other:<{name_width}} -> {'+':>{number_width}}" for other in others)
    return "\n".join(row.rstrip() for row in rows)


def format_operation(rewritten: Rewritten, operation: Operation, path: str) -> str:
    """Return the lines around an operation, its own between ``-->`` and ``<--``."""
    lines = rewritten.source.split("\n")
    start = max(0, operation.line - LINES_BEFORE)
    stop = min(len(lines), operation.line + LINES_AFTER + 1)
    rows = [f"{path}.{operation.name}:", ""]
    if start > 0:
        rows += ["    ....", ""]
    for number in range(start, stop):
        marked = number == operation.line
        rows.append(f"--> {lines[number]} <--" if marked else f"    {lines[number]}")
    if stop < len(lines):
        rows.append("    ....")
    return "\n".join(row.rstrip() for row in rows)
