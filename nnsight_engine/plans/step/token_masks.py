"""Rules about tokens, or parts of the answer, that only the device knows.

With asynchronous scheduling, with drafts, and with vLLM's V2 runner, a step is planned before the host knows
the tokens that were sampled last. The plan then covers every row that a rule may name, and a mask says on the
device which of them it does name.

The part of the answer to which a step's last row belongs stays on the device, for the step after it. Such
requests take no drafts, so the rows of two steps follow each other.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.request_plan import Part, Parts, PlannedAnswer, WhereRule
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.where import Mask, Positions, by_position


def may_match(rule: WhereRule, positions: Positions, prompt_len: int) -> Mask:
    """Return which positions the rule matches for some token."""
    mask = by_position(rule, positions, prompt_len)
    return mask if rule.exclude is None else mask & ~must_match(rule.exclude, positions, prompt_len)


def must_match(rule: WhereRule, positions: Positions, prompt_len: int) -> Mask:
    """Return which positions the rule matches for every token."""
    if rule.tokens is not None or rule.part:
        return np.zeros(len(positions), np.bool_)
    mask = by_position(rule, positions, prompt_len)
    return mask if rule.exclude is None else mask & ~may_match(rule.exclude, positions, prompt_len)


class TokenMasks:
    """Makes masks of rules on the device; the tokens of live requests' rules stay there until ``forget``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sets: dict[tuple[int, ...], torch.Tensor] = {}

    def forget(self) -> None:
        self._sets.clear()

    def mask(
        self,
        rule: WhereRule,
        positions: Positions,
        token_ids: torch.Tensor,
        prompt_len: int,
        parts: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return which positions the rule matches, ``[n]`` on the device, without waiting for it."""
        mask = to_device(by_position(rule, positions, prompt_len), self._device)
        if rule.tokens is not None:
            mask = mask & self._is_among(token_ids, rule.tokens)
        if rule.part:
            if parts is None:
                raise ValueError("the rule names a part of the answer, and the parts are not given")
            mask = mask & (parts == rule.part)
        if rule.exclude is not None:
            mask = mask & ~self.mask(rule.exclude, positions, token_ids, prompt_len, parts)
        return mask

    def _is_among(self, token_ids: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
        """Return which ids are among the tokens; ``torch.isin`` waits for the device if these are many."""
        if not tokens:
            return torch.zeros_like(token_ids, dtype=torch.bool)
        known_ids = self._sets.get(tokens)
        if known_ids is None:
            ids: npt.NDArray[np.int64] = np.unique(np.asarray(tokens, np.int64))
            known_ids = self._sets[tokens] = to_device(ids, self._device)
        ids_on_device = token_ids.to(torch.int64)
        at = torch.searchsorted(known_ids, ids_on_device).clamp_max(len(known_ids) - 1)
        return known_ids[at] == ids_on_device


@dataclasses.dataclass(frozen=True, slots=True)
class RowParts:
    """The parts of rows: the first, ``known`` to the host; and all, on the device, if it lacks some."""

    known: Parts
    rows: torch.Tensor | None = None


class AnswerTracker:
    """Follows the parts of one request's answer from step to step, on the host while it knows the tokens."""

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
        known = self._parts_of_step(start, token_ids[start : start + num_known], token_ids)
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
        """Return the part of the position before a step: by known ids, else as the last step left it."""
        if start <= len(token_ids):
            return self._part_at(start - 1, token_ids)
        if start != self._stop:
            raise RuntimeError("a step of the request was left out, so the part of its answer is not known")
        return self._after

    def _part_at(self, position: int, token_ids: npt.NDArray[np.integer]) -> int:
        """Return the part of a position whose id is known, continuing from the last one asked for."""
        if position < self._prompt_len:
            return self._answer.first
        if position + 1 < self._known_at:  # computed again after a preemption
            self._known_at, self._known_part = self._prompt_len, self._answer.first
        if position + 1 > self._known_at:
            parts = self._answer.scan(token_ids[self._known_at : position + 1], self._known_part)
            self._known_at, self._known_part = position + 1, int(parts[-1])
        return self._known_part

    def _parts_of_step(
        self, start: int, step_ids: npt.NDArray[np.integer], token_ids: npt.NDArray[np.integer]
    ) -> Parts:
        """Return the parts of ``step_ids``, the step's rows whose ids the host knows."""
        num_prompt = min(max(self._prompt_len - start, 0), len(step_ids))
        parts = np.full(len(step_ids), self._answer.first, np.int8)
        if num_prompt < len(step_ids):
            first = start + num_prompt
            parts[num_prompt:] = self._answer.scan(step_ids[num_prompt:], self._part_at(first - 1, token_ids))
        earlier = max(self._prompt_len - 1 - start, 0)
        parts[:earlier] = Part.NONE
        return parts

    def _scan(self, row_ids: torch.Tensor, before: torch.Tensor | int, num_prompt: int) -> torch.Tensor:
        """Return the parts of all rows, on the device: that of the last marker so far, else ``before``."""
        parts = torch.zeros_like(row_ids, dtype=torch.int64)
        for marker, part in self._answer.begun_by.items():
            parts = torch.where(row_ids == marker, part, parts)
        parts[:num_prompt] = 0
        numbers = torch.arange(len(parts), device=parts.device)
        last = torch.where(parts > 0, numbers, -1).cummax(0).values
        return torch.where(last < 0, before, parts[last.clamp_min(0)])
