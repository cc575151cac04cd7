"""Worker-side state of a live request with interventions.

A request is registered when the scheduler first sends it and removed when the scheduler reports it
finished. A preempted request stays registered and keeps the positions that it has already delivered:
the rebuilt KV cache gets the request's writes again, and each read is delivered once.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from nnsight_engine.core.engine_counts import EAGER, GRAPH, TAP
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.conditions import PlannedDetector, PlannedTest
from nnsight_engine.plans.features import PlannedDictionary, PlannedFeatures
from nnsight_engine.plans.records import Failure, StepInfo
from nnsight_engine.plans.request_plan import PlannedOp, RequestPlan
from nnsight_engine.plans.step.answer_tracker import AnswerTracker
from nnsight_engine.plans.step.dictionary_bank import LoadedDictionary
from nnsight_engine.plans.step.instructions import Instructions
from nnsight_engine.plans.step.patterns import PatternState
from nnsight_engine.plans.step.score_slots import Slot
from nnsight_engine.plans.step.stage import SiteKey

BankKey = tuple[str, str, float]
PartTensors = dict[str, torch.Tensor]
"""The tensors of a part by name, see ``core.detector.TENSORS``, float32."""
MLP_OUTPUT: Final = "output"
"""Name of a small network's ``hidden_bias`` and ``weights`` in one tensor, ``[2, hidden]``."""


@dataclasses.dataclass(slots=True)
class ActiveDetector:
    """A detector of a live request.

    Attributes:
        planned: The detector.
        keys: Canonical key of the site of each part.
        tensors: The tensors of each part on the device, float32; of the activation of a feature none.
        dictionaries: The dictionary of each part; None for other parts.
    """

    planned: PlannedDetector
    keys: tuple[SiteKey, ...]
    tensors: tuple[PartTensors, ...]
    dictionaries: tuple[LoadedDictionary | None, ...]


@dataclasses.dataclass(slots=True)
class ActiveTest:
    """A test of a live request.

    Attributes:
        test: The test.
        detector: The detector whose scores it compares.
        slot: Its scores and states by position; None if it needs none.
        is_started: Whether it was evaluated at the request's first position.
    """

    test: PlannedTest
    detector: ActiveDetector
    slot: Slot | None
    is_started: bool = False


@dataclasses.dataclass(slots=True)
class ActiveOp:
    """One operation of a live request, with its tensors on the device.

    Attributes:
        op: The operation.
        index: Its index in the plan.
        keys: Canonical key of each of its sites, see ``site_key``.
        tensor: Operand of the kernel: ``[1 or sites, width]``, for patches ``[1 or sites, positions,
            width]``, for subspaces ``[1 or sites, k, width]``; None where the operation has none.
        units: Selected units as an index tensor, or None.
        constant: Whether it acts on every generated position (True), on none (False), or on
            some (None).
        widths: Width of each site's value.
        detector: DETECT: its detector.
        tests: The tests of its condition.
        loaded: FEATURES, FEATURE: its dictionary.
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
    detector: ActiveDetector | None = None
    tests: tuple[ActiveTest, ...] = ()
    loaded: LoadedDictionary | None = None
    source: SiteKey | None = None
    program: Instructions | None = None

    @property
    def features(self) -> PlannedFeatures:
        """Its features."""
        if self.op.features is None:
            raise RuntimeError(f"{self.op.kind} has no features")
        return self.op.features

    @property
    def dictionary(self) -> LoadedDictionary:
        """Its dictionary."""
        if self.loaded is None:
            raise RuntimeError(f"{self.op.kind} has no dictionary")
        return self.loaded


@dataclasses.dataclass(slots=True)
class Acquired:
    """What a request holds until its end: keys of vectors, slots of its tests, dictionaries."""

    vectors: list[BankKey] = dataclasses.field(default_factory=list)
    slots: list[Slot] = dataclasses.field(default_factory=list)
    dictionaries: list[PlannedDictionary] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class ActiveRequest:
    """One live request: its operations and its progress.

    During a run of steady steps (``steady_run``) progress is counted for all requests together; it is added
    here when the run is settled. ``failed`` holds the ids of all live requests that have failed, this one
    included; the set is shared by all requests of a registrar. ``delivery_s`` belongs to the thread that
    delivers results, everything else to the thread that runs steps.

    Once a request has had drafts, the worker does not know how many of its rows were accepted:
    ``end_position`` is a lower bound then, which moves by the rows that are no drafts. ``charged_position``
    is where rows begin whose captures have not been charged; ``num_drafts`` is the number of drafts of its
    last step. ``encoded`` are the images for which the vision encoder has run with the request's operations.
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
        """Return the progress so far, for the response's provenance."""
        spent_s = self.spent_s + self.delivery_s
        return StepInfo(self.first_position, self.end_position, self.recomputed_tokens, self.tier, spent_s)

    def note_tier(self, tier: str, *, is_prompt: bool) -> None:
        """Note how a step ran, see ``StepInfo``; ``is_prompt`` if it has rows of the prompt."""
        self.has_left_graphs |= tier != GRAPH and not is_prompt
        if EAGER in {tier, self.tier}:
            self.tier = EAGER
        else:
            self.tier = GRAPH if tier == GRAPH and not self.has_left_graphs else TAP

    def advance(self, start: int, stop: int, num_drafts: int = 0) -> None:
        """Record that positions from ``start`` to ``stop`` were computed, the last of them for drafts."""
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
        """Mark the request as failed by an exception; ``what`` says what has failed."""
        if isinstance(error, InterventionError):
            self.fail(error.code, error.message)
        else:
            self.fail("intervention_failed", f"{what}: {error}")

    def fail(self, code: str, message: str) -> None:
        """Mark the request as failed; later calls keep the first reason."""
        if self.failure is None:
            self.failure = Failure(code, message)
            self.failed.add(self.request_id)
