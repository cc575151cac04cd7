"""The parts of an answer: its content, its reasoning and its tool calls, told apart by marker tokens.

A position belongs to the part of the token that is sampled from it: the answer's first position is the
prompt's last, and a marker's own position is the first of the part it begins. The last marker decides.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Parts = npt.NDArray[np.int8]


class Part(enum.IntEnum):
    NONE = 0
    CONTENT = 1
    REASONING = 2
    TOOL_CALLS = 3


class PlannedAnswer(msgspec.Struct, frozen=True):
    """``first`` is the part of the prompt's last position; ``begun_by`` is keyed by the marker's token id."""

    first: int
    begun_by: dict[int, int]

    def scan(self, token_ids: npt.NDArray[np.integer], before: int) -> Parts:
        """Return the part of each token's position, ``[n]``; ``before`` is that of the one before them."""
        parts = np.zeros(len(token_ids) + 1, np.int8)
        parts[0] = before
        for marker, part in self.begun_by.items():
            parts[1:][token_ids == marker] = part
        last: npt.NDArray[np.int64] = np.maximum.accumulate(np.where(parts, np.arange(len(parts)), 0))
        return parts[last[1:]]

    def parts(self, token_ids: npt.NDArray[np.integer], prompt_len: int) -> Parts:
        parts = np.zeros(len(token_ids), np.int8)
        parts[prompt_len - 1 : prompt_len] = self.first
        parts[prompt_len:] = self.scan(token_ids[prompt_len:], self.first)
        return parts


class AnswerMarkers(msgspec.Struct, frozen=True):
    """The markers of a served model's answers; those before one of ``turn_ends`` do not count.

    An answer begins with ``first`` if its prompt has no marker; ``missing`` says why a part cannot be told
    apart.
    """

    begun_by: dict[int, int] = {}
    first: int = Part.CONTENT
    turn_ends: frozenset[int] = frozenset()
    missing: Mapping[str, str] = {}

    @property
    def scopes(self) -> list[str]:
        return [name for part in Part if part and (name := part.name.lower()) not in self.missing]

    def plan(self, prompt_ids: npt.NDArray[np.integer]) -> PlannedAnswer:
        ends = np.flatnonzero(np.isin(prompt_ids, list(self.turn_ends)))
        turn = prompt_ids[ends[-1] + 1 :] if len(ends) else prompt_ids
        planned = PlannedAnswer(self.first, self.begun_by)
        first = planned.scan(turn, self.first)[-1] if len(turn) else self.first
        return PlannedAnswer(int(first), self.begun_by)


_START: Final = "start the server with --reasoning-parser or --tool-call-parser"
NO_MARKERS: Final = AnswerMarkers(
    missing={"content": _START, "reasoning": "start the server with --reasoning-parser",
             "tool_calls": "start the server with --tool-call-parser"}
)  # fmt: skip
"""Of a model whose answers have one part."""
