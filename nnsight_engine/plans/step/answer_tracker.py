"""The part of a request's answer to which each row of a step belongs, without waiting for the device.

Where the host does not know the tokens that were sampled last, the part of a step's last row stays on the
device, for the step after it. Such requests take no drafts, so the rows of two steps follow each other.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.answer_parts import Part, Parts, PlannedAnswer


@dataclasses.dataclass(frozen=True, slots=True)
class RowParts:
    """The parts of rows: the first, ``known`` to the host; and all, on the device, if it lacks some."""

    known: Parts
    rows: torch.Tensor | None = None


class AnswerTracker:
    def __init__(self, answer: PlannedAnswer, prompt_len: int) -> None:
        self._answer = answer
        self._prompt_len = prompt_len
        self._known_at, self._known_part = prompt_len, answer.first
        self._start = self._stop = -1
        self._before: torch.Tensor | int = 0
        self._after: torch.Tensor | int = 0

    def rows(
        self, start: int, num_rows: int, token_ids: npt.NDArray[np.integer], row_ids: torch.Tensor | None
    ) -> RowParts:
        """Return the parts of a step's rows; a step may be planned again, but none may be left out."""
        num_known = min(max(len(token_ids) - start, 0), num_rows)
        known = self._known(start, token_ids[start : start + num_known], token_ids)
        if num_known == num_rows:
            # The host may not know the tokens of the next step, and then not those before either.
            self._start, self._stop = -1, start + num_rows
            self._after = self._part_at(self._stop - 1, token_ids)
            return RowParts(known)
        if row_ids is None:
            raise RuntimeError("the step's tokens are known neither to the host nor on the device")
        if start != self._start:
            self._before = self._part_before(start, token_ids)
        parts = self._scan(row_ids, self._before, max(self._prompt_len - start, 0))
        self._start, self._stop, self._after = start, start + num_rows, parts[-1]
        return RowParts(known, parts)

    def _part_before(self, start: int, token_ids: npt.NDArray[np.integer]) -> torch.Tensor | int:
        if start <= len(token_ids):
            return self._part_at(start - 1, token_ids)
        if start != self._stop:
            raise RuntimeError("a step of the request was left out, so the part of its answer is not known")
        return self._after

    def _part_at(self, position: int, token_ids: npt.NDArray[np.integer]) -> int:
        if position < self._prompt_len:
            return self._answer.first
        if position + 1 < self._known_at:  # computed again after a preemption
            self._known_at, self._known_part = self._prompt_len, self._answer.first
        if position + 1 > self._known_at:
            parts = self._answer.scan(token_ids[self._known_at : position + 1], self._known_part)
            self._known_at, self._known_part = position + 1, int(parts[-1])
        return self._known_part

    def _known(self, start: int, own: npt.NDArray[np.integer], token_ids: npt.NDArray[np.integer]) -> Parts:
        num_prompt = min(max(self._prompt_len - start, 0), len(own))
        parts = np.full(len(own), self._answer.first, np.int8)
        if num_prompt < len(own):
            first = start + num_prompt
            parts[num_prompt:] = self._answer.scan(own[num_prompt:], self._part_at(first - 1, token_ids))
        earlier = max(self._prompt_len - 1 - start, 0)
        parts[:earlier] = Part.NONE
        return parts

    def _scan(self, row_ids: torch.Tensor, before: torch.Tensor | int, num_prompt: int) -> torch.Tensor:
        parts = torch.zeros_like(row_ids, dtype=torch.int64)
        for marker, part in self._answer.begun_by.items():
            parts = torch.where(row_ids == marker, part, parts)
        parts[:num_prompt] = 0
        numbers = torch.arange(len(parts), device=parts.device)
        last = torch.where(parts > 0, numbers, -1).cummax(0).values
        return torch.where(last < 0, before, parts[last.clamp_min(0)])
