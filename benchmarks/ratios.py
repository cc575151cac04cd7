"""From repetitions to the numbers of a table: medians and quartiles of paired ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from benchmarks.cases import Case


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One case's result, as tables and JSON have it.

    Attributes:
        name: The variant's name.
        quantity: What was measured.
        num_requests: Requests in the batch.
        prompt_tokens: Tokens of each prompt.
        ratio: Median over repetitions of ours divided by plain.
        quartiles: First and third quartile of those ratios.
        target: Ratio to reach, None where none is set.
        reached: Whether the median reaches it, None where none is set.
        ours: Median of ours, in the quantity's unit.
        plain: Median of plain, in the quantity's unit.
        num_repeats: Repetitions behind them.
        num_steps: Timed decode steps per side and repetition.
        bound: What bounds the ratio.
    """

    name: str
    quantity: str
    num_requests: int
    prompt_tokens: int
    ratio: float
    quartiles: tuple[float, float]
    target: float | None
    reached: bool | None
    ours: float
    plain: float
    num_repeats: int
    num_steps: int
    bound: str

    @property
    def place(self) -> tuple[str, str, int, int]:
        """What it answers: rows with the same place are about the same."""
        return self.quantity, self.name, self.prompt_tokens, self.num_requests


def summarize(case: Case, plain: Sequence[float], ours: Sequence[float], num_steps: int) -> Row:
    """Return the row of a case out of its repetitions, in order."""
    ratios = np.asarray(ours) / np.asarray(plain)
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return Row(
        name=case.variant.name,
        quantity=str(case.variant.quantity),
        num_requests=case.num_requests,
        prompt_tokens=case.prompt_tokens,
        ratio=middle,
        quartiles=(low, high),
        target=case.target,
        reached=case.reached(middle),
        ours=float(np.median(ours)),
        plain=float(np.median(plain)),
        num_repeats=len(ratios),
        num_steps=num_steps,
        bound=case.variant.bound,
    )
