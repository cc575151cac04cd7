"""What an engine and its client say to each other of one part of a block, ``with tracer.local():``.

The engine names the statement by its place, never by code, and sends the values of variables that its body
reads; the client answers with what the body assigned. A value that goes back as it came is named, so that it
stays the engine's own. ``local_part`` asks and ``local_parts`` answers; docs/remote.md is the format.
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
"""Begins the name of a value that the engine sent."""

T = TypeVar("T")
Place = tuple[int, int, int]
"""Of a statement: line, column, and how many of its items are left from this one on."""


class PartAsked(msgspec.Struct, kw_only=True):
    """A part of a block that is to run.

    Attributes:
        attempt: Of the engine at the trace, unguessable: a server that is started again has another.
        turn: How many were asked before this one.
        block: Which of the trace's blocks it is in.
        place: The statement.
        names: The variables that its body shares with the block.
        values: What those hold that it reads and the engine has.
    """

    attempt: str
    turn: int
    block: int
    place: Place
    names: list[str]
    values: dict[str, Any]


class PartDone(msgspec.Struct, kw_only=True):
    """What came of it.

    Attributes:
        values: What it assigned.
        saved: Names of those values that it saved.
        computed: Names of those values through which gradients would have to pass.
        deleted: Variables that hold nothing any more.
        error: What it raised, see ``wire.encode_error``.
    """

    values: dict[str, Any] = {}
    saved: list[str] = []
    computed: list[str] = []
    deleted: list[str] = []
    error: dict[str, Any] | None = None


def plain(message: PartAsked | PartDone) -> dict[str, Any]:
    """Return a message as a dict, to be encoded."""
    return msgspec.structs.asdict(message)


def read_asked(value: Any) -> PartAsked:
    """Return what the engine asks.

    Raises:
        DecodeError: It is no such message.
    """
    return _read(value, PartAsked)


def read_done(value: Any) -> PartDone:
    """Return what the client answers.

    Raises:
        DecodeError: It is no such message.
    """
    return _read(value, PartDone)


def _read(value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DecodeError(f"this is no message about tracer.local(): {error}") from error


def place_of(nested: Nested) -> Place:
    """Return the place of a statement, the same however deep it was met."""
    return (nested.node.lineno, nested.node.col_offset, len(nested.node.items) - nested.item)


def names_read(body: Sequence[ast.stmt], class_name: str | None) -> frozenset[str]:
    """Return the names whose values the statements may use."""
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
    "PartAsked",
    "PartDone",
    "Place",
    "names_read",
    "place_of",
    "plain",
    "read_asked",
    "read_done",
]
