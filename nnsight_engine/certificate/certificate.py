"""The result of a check, as data and as JSON; verdicts judge one engine's values by the other's.

All differences are relative: of a value to its largest element, of a write to the largest movement of a logit
that it causes in transformers.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from typing import Final

import msgspec
import torch

from nnsight_engine.certificate.measurements import Failure, Measurement

_NO_MOVEMENT: Final = 0.1
"""Part of transformers' movement below which vLLM's is none."""
_NOISE: Final = 4.0
"""How often the engines' difference without a write may be in that of movements without meaning anything."""
_MARGIN: Final = 2.0
_MOST: Final = 0.3


class Status(enum.StrEnum):
    OK = "ok"
    DIFFERS = "differs"
    NOT_COMPARED = "cannot be compared"
    SILENTLY_WRONG = "silently wrong"


class Bounds(msgspec.Struct, frozen=True):
    """The largest relative differences that count as equal.

    Attributes:
        value: Of values, and of logits without a write.
        movement: Of the movement of logits by a write, which is a difference of two.
    """

    value: float
    movement: float

    @classmethod
    def of(cls, tolerance: float) -> Bounds:
        return cls(tolerance, min(10 * tolerance, _MOST))


TOLERANCES: Final = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""What vLLM's dtype accounts for; transformers computes in float32."""


class Verdict(msgspec.Struct, frozen=True):
    """A status; ``difference`` is relative, None without a number, ``reason`` is empty if all is well."""

    status: Status
    difference: float | None = None
    reason: str = ""


def judge_value(wanted: Measurement | None, got: Measurement | None, bounds: Bounds) -> Verdict:
    """Judge vLLM's value (``got``) by transformers' (``wanted``); None is a point that one does not offer."""
    missing = _missing(wanted, got)
    if missing is not None:
        return missing
    assert isinstance(wanted, torch.Tensor) and isinstance(got, torch.Tensor)  # noqa: PT018, S101 - nothing is missing
    if wanted.shape != got.shape:
        return Verdict(Status.DIFFERS, None, f"shape {list(got.shape)} instead of {list(wanted.shape)}")
    difference = relative(got, wanted)
    if difference <= bounds.value:
        return Verdict(Status.OK, difference)
    return Verdict(Status.DIFFERS, difference, f"differs by {difference:.2g} of the largest value")


def judge_movement(
    wanted: Measurement | None,
    got: Measurement | None,
    plain: tuple[torch.Tensor, torch.Tensor],
    bounds: Bounds,
) -> Verdict:
    """Judge logits ``[vocabulary]`` after the same change; ``plain`` are both engines' without it."""
    missing = _missing(wanted, got)
    if missing is not None:
        return missing
    assert isinstance(wanted, torch.Tensor) and isinstance(got, torch.Tensor)  # noqa: PT018, S101 - nothing is missing
    if wanted.shape != got.shape:
        return Verdict(Status.DIFFERS, None, f"logits {list(got.shape)} instead of {list(wanted.shape)}")
    is_finite = plain[0].isfinite()
    wanted_movement, got_movement = (wanted - plain[0])[is_finite], (got - plain[1])[is_finite]
    effect, distance = _size(wanted_movement), _size(got_movement - wanted_movement)
    if effect > 0 and distance <= bounds.movement * effect:
        return Verdict(Status.OK, distance / effect)
    difference = distance / effect if effect else None
    if distance <= _NOISE * _size((plain[1] - plain[0])[is_finite]):
        return Verdict(
            Status.NOT_COMPARED, difference, "the movements differ no more than the engines do without it"
        )
    if _size(got_movement) <= _NO_MOVEMENT * effect:
        return Verdict(Status.SILENTLY_WRONG, difference, "vLLM accepts it, and its logits do not move")
    return Verdict(Status.DIFFERS, difference, "it moves vLLM's logits otherwise than transformers'")


def judge_tokens(wanted: list[int], got: list[int], logits: torch.Tensor, bounds: Bounds) -> Verdict:
    """Judge a greedy continuation; transformers chose from ``logits``, ``[tokens, vocabulary]``."""
    step_apart = next((step for step, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
    if step_apart is None:
        is_same = len(wanted) == len(got)
        return (
            Verdict(Status.OK)
            if is_same
            else Verdict(Status.DIFFERS, None, f"{len(got)} tokens instead of {len(wanted)}")
        )
    row = logits[step_apart]
    margin = float((row[wanted[step_apart]] - row[got[step_apart]]) / row.abs().max())
    if margin <= _MARGIN * bounds.value:
        return Verdict(
            Status.NOT_COMPARED, margin, f"token {step_apart + 1} of the continuation is nearly a tie"
        )
    return Verdict(Status.DIFFERS, margin, f"the continuation differs from token {step_apart + 1} on")


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest finite element of ``wanted``."""
    is_finite = wanted.isfinite()
    scale = _size(wanted[is_finite]) or 1.0
    if not torch.equal(wanted[~is_finite], got[~is_finite]):  # masked elements are the same infinity
        return math.inf
    return _size(got[is_finite] - wanted[is_finite]) / scale


def _size(value: torch.Tensor) -> float:
    """Return the largest absolute element; infinite if there are NaNs."""
    largest = float(value.abs().max()) if value.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def _missing(wanted: Measurement | None, got: Measurement | None) -> Verdict | None:
    """Return the verdict if one of the measurements is no value; None if both are values."""
    if wanted is None or got is None:
        engine = "vLLM" if got is None else "transformers"
        return Verdict(Status.NOT_COMPARED, None, f"{engine} does not offer the point")
    if isinstance(wanted, Failure):
        return Verdict(Status.NOT_COMPARED, None, f"transformers: {wanted.message}")
    if isinstance(got, Failure):
        status = Status.NOT_COMPARED if got.is_refusal else Status.DIFFERS
        return Verdict(status, None, f"vLLM: {got.message}")
    return None


PLAIN: Final = "plain"
VALUES: Final = ("operations", "trace")
WRITES: Final = ("steer", "in place", "assigned")
SKIP: Final = "skip"


class Finding(msgspec.Struct, frozen=True):
    """One comparison.

    Attributes:
        subject: A point, ``layers.4`` for a skipped layer, or ``tokens``.
        what: ``plain`` without interventions; a value read by ``operations`` or by a ``trace``; a change by
            the operation ``steer`` or by a block, ``in place`` or ``assigned``; ``skip``.
    """

    subject: str
    what: str
    verdict: Verdict


class Certificate(msgspec.Struct, frozen=True):
    """All comparisons of a model.

    Attributes:
        architecture: transformers' class.
        dtype: vLLM's dtype; transformers computes in float32.
        num_layers: Number of layers; 0 if transformers' model has no standard points.
        layers: The compared layers.
        findings: The comparisons, in the order in which the model computes the points.
    """

    model: str
    architecture: str
    vllm_class: str
    dtype: str
    versions: dict[str, str]
    prompt_ids: list[int]
    num_layers: int
    layers: list[int]
    bounds: Bounds
    findings: list[Finding]

    @property
    def is_ok(self) -> bool:
        """Whether nothing differs and nothing is silently wrong."""
        return not {Status.DIFFERS, Status.SILENTLY_WRONG} & self.counts().keys()

    def counts(self, *what: str) -> Counter[Status]:
        """Count findings by status, all or those of these kinds, see ``Finding.what``."""
        return Counter(
            finding.verdict.status for finding in self.findings if not what or finding.what in what
        )

    def reasons(self) -> dict[Verdict, list[Finding]]:
        """Return the findings that are not ok, by their status and reason."""
        by_verdict: dict[Verdict, list[Finding]] = {}
        for finding in self.findings:
            if finding.verdict.status is not Status.OK:
                key = Verdict(finding.verdict.status, None, finding.verdict.reason)
                by_verdict.setdefault(key, []).append(finding)
        return by_verdict

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self))

    @classmethod
    def from_json(cls, data: bytes) -> Certificate:
        return msgspec.json.decode(data, type=cls)
