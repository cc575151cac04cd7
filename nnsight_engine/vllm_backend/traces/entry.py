"""What a traced request brings in ``SamplingParams.extra_args``, and what its block leaves behind.

The whole trace travels with each of its requests, because nobody knows which of them the engine runs first,
or ahead of them; the worker reads it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from nnsight_engine.core.saves import SAVES

TRACE_KEY: Final = "nnsight_engine_trace"


class EditEntry(msgspec.Struct, frozen=True):
    """An edit that a request has chosen.

    Attributes:
        name: What it is called, in the engine if it is kept there, and in messages.
        digest: Of the block that is meant; the engine may have another by that name.
        data: The block, if the engine does not keep it.
    """

    name: str
    digest: str
    data: bytes | None = None


class TraceEntry(msgspec.Struct, frozen=True):
    """A request's part in a trace.

    Attributes:
        key: The trace.
        index: Which of its blocks is the request's.
        num_choices: How many requests run the block, ``n`` of its sampling.
        data: All of them, see ``wire``; nothing if the worker was given them before, see ``hold``.
        groups: For each block, its variables' names and the numbers of the surrounding variables they stand
            for: equal numbers are one variable.
        streams: Whether what the block saves is told after each step.
        edits: The edits that run beside the block, in the order in which they have each value.
        is_rehearsal: Whether the request ends once its block has nothing new to ask for, see ``request``.
        is_scan: Whether the shapes of all modules' values are asked for too.
        codec: What the blocks are written in; another than ``wire`` only from senders that are trusted.
        wanted: Names whose values are to come home although nobody saved them.
        prints: Whether what the block prints is told, rather than printed by the worker.
        plain: Whether what is saved must be of JSON's types and tensors, see ``plain``.
        compresses: Whether what is left of the trace is to be compressed.
        sandbox_of: Whose code it is, if they are strangers: it runs as the engine's limits say.
    """

    key: str
    index: Annotated[int, msgspec.Meta(ge=0)]
    num_choices: Annotated[int, msgspec.Meta(ge=1)]
    data: bytes
    groups: list[dict[str, int]]
    streams: bool = False
    edits: list[EditEntry] = []
    is_rehearsal: bool = False
    is_scan: bool = False
    codec: str = "wire"
    wanted: list[str] = []
    prints: bool = False
    compresses: bool = False
    plain: bool = False
    sandbox_of: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Return what vLLM carries."""
        plain: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return plain

    def choice_of(self, request_id: str) -> int:
        """Return which of its request's ``n`` a request is: vLLM names these <choice>_<parent>."""
        return int(request_id.partition("_")[0]) if self.num_choices > 1 else 0

    @staticmethod
    def from_plain(plain: Any) -> TraceEntry:
        """Read what ``to_plain`` made; raises msgspec.ValidationError."""
        return msgspec.convert(plain, TraceEntry)


class Marks:
    """What the blocks of one trace have saved, on whichever thread."""

    def __init__(self, saved: Sequence[Any]) -> None:
        """Start with what was saved before the blocks ran."""
        self.before = list(saved)
        self._kept: list[dict[int, Any]] = []

    def enter(self) -> dict[int, Any]:
        """Collect what the calling thread saves from here on, by identity; the thread ends with its block."""
        SAVES.enter()
        SAVES.marked.update({id(value): value for value in self.before})
        self._kept.append(SAVES.marked)
        return SAVES.marked

    def all(self) -> dict[int, Any]:
        """Return everything saved so far, by identity."""
        return {key: value for kept in self._kept for key, value in kept.items()}
