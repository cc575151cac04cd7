"""The parts of an answer: its content, its reasoning and its tool calls, told apart by marker tokens.

A position belongs to the part of the token that is sampled from it. So an answer's first position is the
prompt's last one, and the position of a marker that begins a part is the first of that part. The last
marker decides, whichever came before it.
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
    """A part of an answer; ``NONE`` for positions before the answer's first."""

    NONE = 0
    CONTENT = 1
    REASONING = 2
    TOOL_CALLS = 3


class PlannedAnswer(msgspec.Struct, frozen=True):
    """How the parts of one request's answer are told apart.

    Attributes:
        first: Part to which the prompt's last position belongs.
        begun_by: The part that begins behind each marker, by the marker's token id.
    """

    first: int
    begun_by: dict[int, int]

    def scan(self, token_ids: npt.NDArray[np.integer], before: int) -> Parts:
        """Return the part of each token's position.

        Args:
            token_ids: Consecutive tokens of the answer, ``[n]``.
            before: The part of the position before them.

        Returns:
            ``[n]``.
        """
        parts = np.zeros(len(token_ids) + 1, np.int8)
        parts[0] = before
        for marker, part in self.begun_by.items():
            parts[1:][token_ids == marker] = part
        last: npt.NDArray[np.int64] = np.maximum.accumulate(np.where(parts, np.arange(len(parts)), 0))
        return parts[last[1:]]

    def parts(self, token_ids: npt.NDArray[np.integer], prompt_len: int) -> Parts:
        """Return the parts of all positions from the prompt's first on, ``[n]`` as ``token_ids``."""
        parts = np.zeros(len(token_ids), np.int8)
        parts[prompt_len - 1 : prompt_len] = self.first
        parts[prompt_len:] = self.scan(token_ids[prompt_len:], self.first)
        return parts


class AnswerMarkers(msgspec.Struct, frozen=True):
    """The markers of a served model's answers.

    Attributes:
        begun_by: As in ``PlannedAnswer``.
        first: Part with which an answer begins if its prompt has no marker.
        turn_ends: Tokens between turns. Markers of earlier turns do not count.
        missing: Why a part cannot be told apart, by its name.
    """

    begun_by: dict[int, int] = {}
    first: int = Part.CONTENT
    turn_ends: frozenset[int] = frozenset()
    missing: Mapping[str, str] = {}

    @property
    def scopes(self) -> list[str]:
        """The names of the parts that can be told apart."""
        return [name for part in Part if part and (name := part.name.lower()) not in self.missing]

    def plan(self, prompt_ids: npt.NDArray[np.integer]) -> PlannedAnswer:
        """Return how the parts of the answer to a prompt are told apart."""
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
