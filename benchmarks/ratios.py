"""From repetitions to the numbers of a table: medians and quartiles of paired ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from benchmarks.cases import Case


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One case's result.

    Attributes:
        case: The comparison.
        ratio: Median over repetitions of ours divided by plain.
        quartiles: First and third quartile of those ratios.
        ours: Median of ours, in the case's unit.
        plain: Median of plain, in the case's unit.
        num_repeats: Repetitions behind them.
    """

    case: Case
    ratio: float
    quartiles: tuple[float, float]
    ours: float
    plain: float
    num_repeats: int

    @property
    def reached(self) -> bool | None:
        """Whether the median reaches the target, None where none is set."""
        return self.case.reached(self.ratio)


def summarize(case: Case, plain: Sequence[float], ours: Sequence[float]) -> Row:
    """Return the row of a case out of its repetitions, in order."""
    ratios = np.asarray(ours) / np.asarray(plain)
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return Row(case, middle, (low, high), float(np.median(ours)), float(np.median(plain)), len(ratios))
