"""Received blocks: their variables, the variables that they share, and the message with their outcomes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from nnsight_engine.core.closure_cells import UNBOUND, Assignments, content
from nnsight_engine.core.saves import holds_marked
from nnsight_engine.serialization import DecodeError, EncodeError, MessageLimits, encode_error
from nnsight_engine.serialization.graph import Reference
from nnsight_engine.serialization.message import Piece
from nnsight_engine.serialization.wire import DEFAULT_LIMITS, encode_pieces
from nnsight_engine.tracing.tracer import Info

logger = logging.getLogger(__name__)

SAVED: Final = "saved"
"""Name, among a trace's shared values, of the list of containers that were saved before its blocks ran."""

_MAX_SAID: Final = 2000
"""Maximum number of characters of an error in an event; the full error is in the result."""


class ReceivedInvoke:
    """A block with its variables, and the surrounding variables that they represent.

    See ``interleaving.shared_variables``. ``cells`` are the block's own cells, ``stored`` the names that it
    may assign; ``marked`` are the objects it has saved, by identity, if the engine keeps them per block.
    """

    __slots__ = ("args", "assignments", "cells", "identities", "info", "kwargs", "marked", "stored")

    def __init__(self, info: Info, groups: Mapping[str, int]) -> None:
        """Create the invoke of a block; variables with equal numbers represent one surrounding variable."""
        self.info = info
        self.cells = info.variables
        self.identities = {name: groups[name] for name in info.variables if name in groups}
        self.stored = info.block.stored
        self.assignments = Assignments(self.cells)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.marked: dict[int, Any] = {}

    def saves(self, marked: Mapping[int, Any]) -> dict[str, Any]:
        """Return the saved variables, by name; ``marked`` holds the saved objects, by identity."""
        return {name: value for name, value in self._assigned().items() if holds_marked(value, marked)}

    def flows(self, marked: Mapping[int, Any], wanted: Collection[str]) -> dict[str, Any]:
        """Return variables that were not saved, but that later traces of a session use, by name."""
        values = {name: value for name, value in self._assigned().items() if name in wanted}
        return {name: value for name, value in values.items() if not holds_marked(value, marked)}

    def _assigned(self) -> dict[str, Any]:
        values = {name: content(self.cells[name]) for name in self.stored}
        return {name: value for name, value in values.items() if value is not UNBOUND}

    def finish(self) -> None:
        """Do nothing; called when the trace is over, after which the engine reads the variables itself."""


def invokes_of(blocks: Sequence[Info], groups: Sequence[Mapping[str, int]]) -> list[ReceivedInvoke]:
    """Return the blocks with their variables; ``groups`` is ``TraceHead.groups``, and must be as long."""
    if len(blocks) != len(groups):
        raise DecodeError(
            f"the trace is broken: it has {len(blocks)} blocks and says of {len(groups)} what they share"
        )
    return [ReceivedInvoke(info, names) for info, names in zip(blocks, groups, strict=True)]


def outcome_of(
    index: int,
    saves: Mapping[str, Any],
    error: dict[str, Any] | None,
    *,
    choice: int = 0,
    flows: Mapping[str, Any] = MappingProxyType({}),
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a block's outcome in the form used in messages; ``error`` is the result of ``encode_error``."""
    return {
        "index": index,
        "choice": choice,
        "saves": saves,
        "error": error,
        "shapes": {},
        "flows": dict(flows),
        "warnings": list(warnings),
    }


def failure_of(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return a short text of the first block's error; an empty string if no block failed."""
    error = next((block["error"] for block in blocks if block["error"] is not None), None)
    if error is None:
        return ""
    text = f"{error['name']}: {error['message']}"[:_MAX_SAID]
    return text.encode("utf-8", "backslashreplace").decode()  # events cannot hold lone surrogates


def outcome_pieces(
    message: dict[str, Any],
    reference: Reference,
    *,
    compress: bool = False,
    limits: MessageLimits = DEFAULT_LIMITS,
) -> list[Piece]:
    """Return the message without a copy of host tensors; unserializable values fail only their own block."""
    write = partial(encode_pieces, reference=reference, limits=limits)
    try:
        return write(message, compress=compress)
    except EncodeError:
        logger.debug("a saved value cannot be sent", exc_info=True)
    for block in message["blocks"]:
        try:
            write([block["saves"], block["flows"]])
        except EncodeError as error:
            _failed(block, error)
    try:
        return write(message, compress=compress)
    except EncodeError:
        message["before"] = None
    try:
        return write(message, compress=compress)
    except EncodeError as error:  # together they exceed the limits
        for block in message["blocks"]:
            _failed(block, error)
        return write(message)


def _failed(block: dict[str, Any], error: EncodeError) -> None:
    block["saves"] = block["flows"] = {}
    block["error"] = block["error"] or encode_error(error)
