"""Messages between an engine and its client about one part of a block, ``with tracer.local():``.

The engine identifies the statement by its position, never by code. A value that is returned unchanged is sent
as a reference, so that it remains the engine's own object. ``docs/remote.md`` specifies the format.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from nnsight_engine.serialization import DecodeError
from nnsight_engine.tracing.block_names import mangled, names_in
from nnsight_engine.tracing.blocks import Nested

GIVEN: Final = "given"
"""First element of the reference to a value that the engine sent."""

T = TypeVar("T")
Place = tuple[int, int, int]
"""Position of a statement: line, column, and the number of its items from this one to the last."""


class PartRequest(msgspec.Struct, kw_only=True):
    """A request to run a part of a block.

    Attributes:
        attempt: Unguessable id of the engine's run of the trace; a restarted server uses another one.
        turn: Number of requests before this one.
        names: The variables that its body shares with the block.
        values: Values of the variables that the body reads, as far as the engine has them.
    """

    attempt: str
    turn: int
    block: int
    place: Place
    names: list[str]
    values: dict[str, Any]


class PartResult(msgspec.Struct, kw_only=True):
    """The result of a part; gradients would have to pass through ``computed``, ``deleted`` are unbound."""

    values: dict[str, Any] = {}
    saved: list[str] = []
    computed: list[str] = []
    deleted: list[str] = []
    error: dict[str, Any] | None = None


def plain(message: PartRequest | PartResult) -> dict[str, Any]:
    return msgspec.structs.asdict(message)


def read_part_request(value: Any) -> PartRequest:
    return _read(value, PartRequest)


def read_part_result(value: Any) -> PartResult:
    return _read(value, PartResult)


def _read(value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DecodeError(f"this is no message about tracer.local(): {error}") from error


def place_of(nested: Nested) -> Place:
    """Return the position of a statement, independent of the nesting level from which it was reached."""
    return (nested.node.lineno, nested.node.col_offset, len(nested.node.items) - nested.item)


def names_read(body: Sequence[ast.stmt], class_name: str | None) -> frozenset[str]:
    found = names_in(body)
    stored = {
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    used = {
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    changed = {
        node.target.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    return mangled(frozenset(found - (stored - used - changed)), class_name)


__all__ = [
    "GIVEN",
    "PartRequest",
    "PartResult",
    "Place",
    "names_read",
    "place_of",
    "plain",
    "read_part_request",
    "read_part_result",
]
