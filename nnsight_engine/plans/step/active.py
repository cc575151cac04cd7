"""Worker-side state of a live request with interventions.

A preempted request keeps the positions that it has already delivered: the rebuilt KV cache gets the request's
writes again, and each read is delivered once.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.work_context import EAGER, GRAPH, TAP
from nnsight_engine.plans.records import Failure, StepInfo
from nnsight_engine.plans.request_plan import (
    PlannedDictionary,
    PlannedFeatures,
    PlannedOp,
    PlannedScore,
    PlannedTest,
    RequestPlan,
)
from nnsight_engine.plans.step.banks import LoadedDictionary, Slot
from nnsight_engine.plans.step.context import SiteKey
from nnsight_engine.plans.step.instructions import Instructions
from nnsight_engine.plans.step.read_kernels import PatternState
from nnsight_engine.plans.step.token_masks import AnswerTracker

BankKey = tuple[str, str, float]
PartTensors = dict[str, torch.Tensor]
"""The tensors of a part by name, see ``core.detector.TENSORS``, float32."""
MLP_OUTPUT: Final = "output"
"""Name of a small network's ``hidden_bias`` and ``weights`` in one tensor, ``[2, hidden]``."""


@dataclasses.dataclass(slots=True)
class ActiveScore:
    """A score of a live request; ``tensors`` and ``dictionaries`` have one item for each part."""

    planned: PlannedScore
    keys: tuple[SiteKey, ...]
    tensors: tuple[PartTensors, ...]
    dictionaries: tuple[LoadedDictionary | None, ...]


@dataclasses.dataclass(slots=True)
class ActiveTest:
    test: PlannedTest
    score: ActiveScore
    slot: Slot | None
    is_started: bool = False


@dataclasses.dataclass(slots=True)
class ActiveOp:
    """One operation of a live request, with its tensors on the device.

    Attributes:
        tensor: Operand of the kernel: ``[1 or sites, width]``, for patches ``[1 or sites, positions,
            width]``, for subspaces ``[1 or sites, k, width]``; None where the operation has none.
        constant: Whether it acts on every generated position; None for some of them.
        source: FEATURE: key of the site that the dictionary reads; None if it is that of the operation.
        program: Its instruction at each site; None if it is none, or depends on the step.
    """

    op: PlannedOp
    index: int
    keys: tuple[SiteKey, ...]
    tensor: torch.Tensor | None
    units: torch.Tensor | None
    constant: bool | None
    widths: tuple[int, ...]
    score: ActiveScore | None = None
    tests: tuple[ActiveTest, ...] = ()
    loaded: LoadedDictionary | None = None
    source: SiteKey | None = None
    program: Instructions | None = None

    @property
    def features(self) -> PlannedFeatures:
        if self.op.features is None:
            raise RuntimeError(f"{self.op.kind} has no features")
        return self.op.features

    @property
    def dictionary(self) -> LoadedDictionary:
        if self.loaded is None:
            raise RuntimeError(f"{self.op.kind} has no dictionary")
        return self.loaded


@dataclasses.dataclass(slots=True)
class Acquired:
    """What a request must give back at its end, by the bank or table that lent it."""

    vectors: list[BankKey] = dataclasses.field(default_factory=list)
    slots: list[Slot] = dataclasses.field(default_factory=list)
    dictionaries: list[PlannedDictionary] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class ActiveRequest:
    """One live request: its operations and its progress, without that of a streak until it is settled.

    ``failed``, the ids of all live requests that have failed, is shared by all requests of a registrar.
    ``delivery_s`` belongs to the thread that delivers results, everything else to the thread that runs steps.

    Once a request has had drafts, ``end_position`` is a lower bound: the worker does not know how many rows
    were accepted. ``charged_position`` is where rows begin whose captures have not been charged. ``encoded``
    are the images for which the vision encoder has run with the request's operations.
    """

    request_id: str
    plan: RequestPlan
    ops: list[ActiveOp]
    acquired: Acquired
    steady: bool
    has_drafts: bool = False
    charged_position: int = 0
    num_drafts: int = 0
    first_position: int = -1
    end_position: int = 0
    recomputed_tokens: int = 0
    tier: str = TAP
    has_left_graphs: bool = False
    spent_s: float = 0.0
    delivery_s: float = 0.0
    failure: Failure | None = None
    reductions: set[int] = dataclasses.field(default_factory=set)
    means: dict[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    patterns: PatternState = dataclasses.field(default_factory=PatternState)
    failed: set[str] = dataclasses.field(default_factory=set)
    answer: AnswerTracker | None = None
    encoded: set[int] = dataclasses.field(default_factory=set)

    def info(self) -> StepInfo:
        spent_s = self.spent_s + self.delivery_s
        return StepInfo(self.first_position, self.end_position, self.recomputed_tokens, self.tier, spent_s)

    def note_tier(self, tier: str, *, is_prompt: bool) -> None:
        """Record how one of its steps ran; one run with hooks counts for good, see ``StepInfo``."""
        self.has_left_graphs |= tier != GRAPH and not is_prompt
        if EAGER in {tier, self.tier}:
            self.tier = EAGER
        else:
            self.tier = GRAPH if tier == GRAPH and not self.has_left_graphs else TAP

    def advance(self, start: int, stop: int, num_drafts: int = 0) -> None:
        """Record that positions were computed, the last of them for drafts.

        Once a request has had drafts, ``start`` may be too high by the number of refused ones.
        """
        if self.first_position < 0:
            self.first_position = start
            self.end_position = start
        self.num_drafts = num_drafts
        self.has_drafts |= num_drafts > 0
        stop -= num_drafts
        # A start within the prompt is exact, also one behind rows from the prefix cache.
        if self.has_drafts and start > max(self.end_position, self.plan.prompt_len):
            start, stop = self.end_position, stop - (start - self.end_position)
        self.recomputed_tokens += max(0, min(self.end_position, stop) - start)
        self.end_position = max(self.end_position, stop)

    def fail_by(self, error: Exception, what: str) -> None:
        """Fail with an InterventionError's code, else ``intervention_failed``; ``what`` was attempted."""
        if isinstance(error, InterventionError):
            self.fail(error.code, error.message)
        else:
            self.fail("intervention_failed", f"{what}: {error}")

    def fail(self, code: str, message: str) -> None:
        """Mark the request as failed; later calls keep the first reason."""
        if self.failure is None:
            self.failure = Failure(code, message)
            self.failed.add(self.request_id)
