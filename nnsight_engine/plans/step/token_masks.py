"""Rules about tokens, or parts of the answer, that only the device knows.

With asynchronous scheduling, with drafts, and with vLLM's V2 runner, a step is planned before the host knows
the tokens that were sampled last. The plan then covers every row that a rule may name, and a mask says on the
device which of them it does name.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.request_plan import WhereRule
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
        found = self._sets.get(tokens)
        if found is None:
            ids: npt.NDArray[np.int64] = np.unique(np.asarray(tokens, np.int64))
            found = self._sets[tokens] = to_device(ids, self._device)
        ids_on_device = token_ids.to(torch.int64)
        at = torch.searchsorted(found, ids_on_device).clamp_max(len(found) - 1)
        return found[at] == ids_on_device
