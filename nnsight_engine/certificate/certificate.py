"""The result of a check, as data and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from nnsight_engine.certificate.verdicts import Bounds, Status, Verdict

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
        return Counter(one.verdict.status for one in self.findings if not what or one.what in what)

    def reasons(self) -> dict[Verdict, list[Finding]]:
        found: dict[Verdict, list[Finding]] = {}
        for one in self.findings:
            if one.verdict.status is not Status.OK:
                key = Verdict(one.verdict.status, None, one.verdict.reason)
                found.setdefault(key, []).append(one)
        return found

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self))

    @classmethod
    def from_json(cls, data: bytes) -> Certificate:
        return msgspec.json.decode(data, type=cls)
