"""From repetitions to the numbers of a table: medians and quartiles of paired ratios, over processes."""

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
        ratio: Ours divided by plain: the median over processes of each one's median over repetitions.
        quartiles: First and third quartile of all repetitions' ratios.
        processes: The lowest and the highest process's median. Where memory happens to lie, one process's
            engines differ from another's by several percent, which no number of repetitions shows.
        target: Ratio to reach, None where none is set.
        reached: Whether the median reaches it, None where none is set.
        ours: Median of ours, in the quantity's unit.
        plain: Median of plain, in the quantity's unit.
        num_processes: Processes behind them.
        num_repeats: Repetitions in each.
        num_steps: Timed decode steps per side and repetition.
        bound: What bounds the ratio.
    """

    name: str
    quantity: str
    num_requests: int
    prompt_tokens: int
    ratio: float
    quartiles: tuple[float, float]
    processes: tuple[float, float]
    target: float | None
    reached: bool | None
    ours: float
    plain: float
    num_processes: int
    num_repeats: int
    num_steps: int
    bound: str

    @property
    def place(self) -> tuple[str, str, int, int]:
        """What it answers: rows with the same place are about the same."""
        return self.quantity, self.name, self.prompt_tokens, self.num_requests


def summarize(
    case: Case, mode: str, plain: Sequence[Sequence[float]], ours: Sequence[Sequence[float]], num_steps: int
) -> Row:
    """Return the row of a case in ``mode`` out of each process's repetitions, in order."""
    ratios = np.asarray(ours) / np.asarray(plain)
    medians = np.median(ratios, axis=1)
    middle = float(np.median(medians))
    low, high = np.quantile(ratios, [0.25, 0.75]).tolist()
    return Row(
        name=case.variant.name,
        quantity=str(case.variant.quantity),
        num_requests=case.num_requests,
        prompt_tokens=case.prompt_tokens,
        ratio=middle,
        quartiles=(low, high),
        processes=(float(medians.min()), float(medians.max())),
        target=case.target(mode),
        reached=case.reached(middle, mode),
        ours=float(np.median(np.asarray(ours))),
        plain=float(np.median(np.asarray(plain))),
        num_processes=ratios.shape[0],
        num_repeats=ratios.shape[1],
        num_steps=num_steps,
        bound=case.variant.bound,
    )
