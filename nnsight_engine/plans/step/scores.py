"""Kernels of detectors and of tests on their scores, over many requests.

The parts of a detector write their numbers into columns, at the points that they read. At the last of them
the sum becomes a score, or the truth of a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from nnsight_engine.core.detector import Form, Link
from nnsight_engine.plans.step.reads import ReadKernel, SiteValue
from nnsight_engine.plans.step.score_slots import SlotTable

PartTensors = dict[str, torch.Tensor]
"""The tensors of a part by name, see ``core.detector.TENSORS``, float32."""


@dataclasses.dataclass(slots=True)
class AnyParts(ReadKernel):
    """Parts of a form that is no instruction.

    ``pieces`` has each one's first row, the row after its last, and its tensors.
    """

    rows: torch.Tensor
    form: Form
    pieces: Sequence[tuple[int, int, PartTensors]]
    out: torch.Tensor

    def read(self, value: SiteValue) -> None:
        """Compute one number per row."""
        x = value.sums(self.rows)
        for start, stop, own in self.pieces:
            if self.form is Form.MLP:
                hidden = torch.addmm(own["hidden_bias"], x[start:stop], own["hidden_weights"].T).relu_()
                found = hidden @ own["weights"]
            else:
                found = -((x[start:stop] - own["mean"]) * own["scale"]).norm(dim=-1)
            self.out[start:stop] = found


@dataclasses.dataclass(slots=True)
class Scores:
    """``link(sum of parts + bias)``; ``parts`` is ``[rows, parts]``, ``bias`` ``[rows]``."""

    parts: torch.Tensor
    bias: torch.Tensor
    link: Link

    def rows(self) -> torch.Tensor:
        """Return the scores, ``[rows]``."""
        total = self.parts.sum(dim=1) + self.bias
        return total if self.link is Link.IDENTITY else total.sigmoid()


@dataclasses.dataclass(slots=True)
class TestColumns:
    """What the tests of a kernel compare with, ``[tests, 1]``.

    Attributes:
        sign: Factor on the scores.
        threshold: Above it a test begins to hold.
        keeps: Above it a test holds on.
        latches: Whether a test holds on anyway.
    """

    sign: torch.Tensor
    threshold: torch.Tensor
    keeps: torch.Tensor
    latches: torch.Tensor


@dataclasses.dataclass(slots=True)
class SlotTests(ReadKernel):
    """Tests with slots, each on consecutive positions; ``out``, ``[rows]``, is whether they hold.

    Scores are laid out as ``[tests, steps]``, with a row for each test and a column for each of its rows.

    Attributes:
        scores: The scores of all rows.
        columns: The tests.
        over: See ``PlannedTest``; alike for all.
        length: Number of positions of the window.
        takes_mean: Whether scores are reduced to their mean.
        table: The tests' slots.
        slots: Row of each test in the table, ``[tests]``.
        starts: Position of each test's first row, ``[tests]``.
        prompts: Length of each request's prompt, ``[tests, 1]``.
        owner: The test of each row, ``[rows]``.
        step: The column of each row, ``[rows]``.
        num_steps: Number of columns.
        out: See above.
    """

    __test__ = False

    scores: Scores
    columns: TestColumns
    over: str
    length: int
    takes_mean: bool
    table: SlotTable
    slots: torch.Tensor
    starts: torch.Tensor
    prompts: torch.Tensor
    owner: torch.Tensor
    step: torch.Tensor
    num_steps: int
    out: torch.Tensor

    def advance(self) -> None:
        """Move to the next position."""
        self.starts += 1

    def read(self, value: SiteValue) -> None:
        """Reduce and compare the scores, and store them with the tests' states."""
        del value
        table, slots, starts = self.table, self.slots, self.starts
        flat = self.scores.rows()
        own = flat.new_zeros(len(slots), self.num_steps)
        own[self.owner, self.step] = flat
        own = own * self.columns.sign
        steps = torch.arange(self.num_steps, device=own.device)
        positions = starts.unsqueeze(1) + steps
        cells = (slots[self.owner], positions[self.owner, self.step])
        match self.over:
            case "window":
                reduced = self._over_window(own)
                table.scores[cells] = own[self.owner, self.step]
            case "prompt":
                running, reduced = self._over_prompt(own, positions)
                table.reduced[cells] = running[self.owner, self.step]
            case _:
                reduced = own
        begins = reduced > self.columns.threshold
        stays = self.columns.latches | (reduced > self.columns.keeps)
        held = _held(begins, stays, table.held[slots, (starts - 1).clamp_min(0)] & (starts > 0), steps)
        found = held[self.owner, self.step]
        table.held[cells] = found
        self.out.copy_(found)

    def _over_window(self, own: torch.Tensor) -> torch.Tensor:
        """Return the reduction of the last scores at each step."""
        earlier = self.starts.unsqueeze(1) + torch.arange(1 - self.length, 0, device=own.device)
        before = self.table.scores[self.slots.unsqueeze(1), earlier.clamp_min(0)]
        scores = torch.cat([before, own], dim=1)
        exists = torch.cat([earlier >= 0, torch.ones_like(own, dtype=torch.bool)], dim=1)
        if self.takes_mean:
            total = torch.where(exists, scores, 0).unfold(1, self.length, 1).sum(dim=-1)
            return total / exists.to(torch.float32).unfold(1, self.length, 1).sum(dim=-1)
        return torch.where(exists, scores, -torch.inf).unfold(1, self.length, 1).amax(dim=-1)

    def _over_prompt(self, own: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum or the largest of the prompt's scores up to each step, and their reduction."""
        neutral = 0.0 if self.takes_mean else -torch.inf
        before = self.table.reduced[self.slots, (self.starts - 1).clamp_min(0)]
        before = torch.where(self.starts > 0, before, neutral).unsqueeze(1)
        all_scores = torch.cat([before, torch.where(positions < self.prompts, own, neutral)], dim=1)
        if self.takes_mean:
            running = all_scores.cumsum(dim=1)[:, 1:]
            return running, running / torch.minimum(positions + 1, self.prompts)
        running = all_scores.cummax(dim=1).values[:, 1:]
        return running, running


def _held(
    begins: torch.Tensor, stays: torch.Tensor, before: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """Return the states at each step, ``[tests, steps]``, given those before the first, ``[tests]``."""
    if len(steps) == 1:
        return begins | (stays & before.unsqueeze(1))
    # A step decides where the state begins or ends; all others have that of the last that decided.
    last = torch.where(begins | ~stays, steps, -1).cummax(dim=1).values
    return torch.where(last >= 0, begins.gather(1, last.clamp_min(0)), before.unsqueeze(1))


@dataclasses.dataclass(slots=True)
class MovingPrograms:
    """Programs of conditions, ``[rows, words]``, some of whose words are addresses of a position's state.

    ``moves`` is how far these are from one position to the next, ``[words]``.
    """

    words: torch.Tensor
    moves: torch.Tensor

    def advance(self) -> None:
        """Move to the next position."""
        self.words += self.moves
