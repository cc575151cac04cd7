"""One request's interventions as the worker receives them: resolved, validated, plain data.

Only ``plans.compile`` builds plans, from a request's JSON; the worker trusts their structure.
Points are resolved to single sites, positions are absolute, and tensors are
named by the hash of their content, so that a vector shared by many requests is held once.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Final

import msgspec

from nnsight_engine.core.leaves import PATTERN, STATE
from nnsight_engine.plans.answer_parts import PlannedAnswer
from nnsight_engine.plans.conditions import PlannedCondition, PlannedDetector
from nnsight_engine.plans.features import PlannedFeatures
from nnsight_engine.plans.sites import PlannedSite

PLAN_KEY: Final = "nnsight_engine"
"""Key of the engine's entry in vLLM's ``SamplingParams.extra_args``."""


class OperationKind(enum.StrEnum):
    """Effect of an operation at its sites; the first nine write, the others read.

    STOP and FLAG read whether their condition holds.
    """

    ADD = "add"
    NORM_MATCH = "norm_match"
    PROJECT = "project"
    SUBSPACE = "subspace"
    REPLACE = "replace"
    ZERO = "zero"
    MEAN = "mean"
    PATCH = "patch"
    FEATURE = "feature"
    CAPTURE = "capture"
    PROBE = "probe"
    LENS = "logit_lens"
    DETECT = "detect"
    FEATURES = "features"
    STOP = "stop"
    FLAG = "flag"


MARKS: Final = frozenset({OperationKind.STOP, OperationKind.FLAG})
"""Operations that only tell where their condition holds."""

READS: Final = MARKS | {
    OperationKind.CAPTURE,
    OperationKind.PROBE,
    OperationKind.LENS,
    OperationKind.DETECT,
    OperationKind.FEATURES,
}


class WhereRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """The absolute positions that an operation matches; all conditions must hold.

    Attributes:
        phase: ``all``, ``prompt`` (below the prompt's length) or ``generated``.
        positions: Absolute positions, sorted, or None for any; in a vision encoder numbers of rows.
        start: First position of the half-open range.
        stop: End of the half-open range, None for open.
        tokens: Ids of the input token at the position, or None for any.
        part: Part of the answer that the position belongs to, see ``answer_parts``; 0 for any or none.
        exclude: Positions that match this rule are excluded.
    """

    phase: str = "all"
    positions: tuple[int, ...] | None = None
    start: int = 0
    stop: int | None = None
    tokens: tuple[int, ...] | None = None
    part: int = 0
    exclude: WhereRule | None = None

    @property
    def names_part(self) -> bool:
        """Whether the rule depends on the parts of the answer."""
        return bool(self.part) or (self.exclude is not None and self.exclude.names_part)


class TensorData(msgspec.Struct, frozen=True):
    """A tensor's bytes, little-endian and contiguous; ``dtype`` is the torch name (``float32``)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def key(self) -> str:
        """Return the hash of the content, the tensor's name in plans (64 hex digits)."""
        head = f"{self.dtype}:{','.join(map(str, self.shape))}:".encode()
        return hashlib.sha256(head + self.data).hexdigest()


class PlannedOp(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation, at one or more sites.

    Attributes:
        kind: Its effect.
        sites: Sites in the model, in the order of the request's ``at``, no site twice.
        where: The positions it matches.
        name: Key of the operation's result; empty for writes.
        scale: ADD, NORM_MATCH, REPLACE: factor on the vector; PROJECT, SUBSPACE: the part that is removed of
            the value's component along the vector, or in the span of the vectors.
        tensor: Key of its tensor, see ``TensorData.key``. Steer vectors, probe weights and ablation values:
            ``[width]`` for all sites or ``[sites, width]``; PATCH: ``[positions, width]`` or
            ``[sites, positions, width]`` in the order of ``where.positions``; SUBSPACE: an orthonormal basis,
            ``[k, width]`` or ``[sites, k, width]``, whose last rows may be zeros.
        offset: PROJECT: added to the component.
        low: PROJECT: the component is raised to it at the end; None for no bound.
        high: PROJECT: likewise lowered.
        units: Selected units of the flattened width for ZERO, MEAN, REPLACE; None for all.
        reduce: CAPTURE: ``none``, ``mean`` or ``last``.
        dtype: CAPTURE: torch name of the result's dtype.
        bias: PROBE: added to each dot product.
        top_k: LENS: tokens per position.
        targets: LENS: token ids whose log-probability and rank are reported.
        detector: DETECT: the detector, which reads at the sites.
        features: FEATURES, FEATURE: the features of a dictionary.
        when: The condition under which it acts at a position; None for always. STOP and FLAG have one, and as
            site the last that it reads.
    """

    kind: OperationKind
    sites: tuple[PlannedSite, ...]
    where: WhereRule = WhereRule()
    name: str = ""
    scale: float = 1.0
    tensor: str = ""
    offset: float = 0.0
    low: float | None = None
    high: float | None = None
    units: tuple[int, ...] | None = None
    reduce: str = "none"
    dtype: str = ""
    bias: float = 0.0
    top_k: int = 0
    targets: tuple[int, ...] = ()
    detector: PlannedDetector | None = None
    features: PlannedFeatures | None = None
    when: PlannedCondition | None = None

    @property
    def reads(self) -> bool:
        """Whether the operation leaves the model's values unchanged."""
        return self.kind in READS

    @property
    def is_in_encoder(self) -> bool:
        """Whether it acts in the vision encoder, and so nowhere else; its positions are rows of images."""
        return self.sites[0].is_in_encoder

    @property
    def averages_prompt(self) -> bool:
        """Whether the operation needs all positions of the prompt in one step, over which it takes a mean."""
        return self.kind is OperationKind.MEAN and not self.is_in_encoder

    @property
    def captures_patterns(self) -> bool:
        """Whether the operation captures attention patterns; it then captures nothing else."""
        return self.sites[0].leaf == PATTERN

    @property
    def captures_states(self) -> bool:
        """Whether the operation captures recurrent states; it then captures nothing else."""
        return self.sites[0].leaf == STATE


class PlannedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt.

    Attributes:
        spans: Its positions, half-open ranges.
        num_rows: Number of its rows in the vision encoder, one for each patch. Rows are numbered over all
            images of a prompt.
    """

    spans: tuple[tuple[int, int], ...]
    num_rows: int


class RequestPlan(msgspec.Struct, frozen=True):
    """All operations of a request on one prompt.

    Attributes:
        prompt_len: Number of prompt tokens; positions from here on are generated.
        ops: The operations, in the order given.
        stream: Whether results are sent with each token, or all at the end.
        fingerprint: Hash over the writes (hex), the base of the cache salt; empty without writes.
        answer: How the parts of the answer are told apart; None if no operation names one.
        images: The prompt's images; empty if no operation acts in the vision encoder.
        num_positions: Number of positions that are computed at most.
        dictionaries: The files of the dictionaries that the operations use, by SHA-256.
        works: The work of operations, by index, if together they have much, see ``plans.work``.
        weights: The weights that operations with much work read in a step, see ``plans.work``.
    """

    prompt_len: int
    ops: tuple[PlannedOp, ...]
    stream: bool = False
    fingerprint: str = ""
    answer: PlannedAnswer | None = None
    images: tuple[PlannedImage, ...] = ()
    num_positions: int = 0
    dictionaries: dict[str, str] = {}
    works: dict[int, float] = {}
    weights: float = 0.0

    @property
    def num_points(self) -> int:
        """Number of points at which its operations and their tests act or read; at least one."""
        tests = (test for op in self.ops if op.when is not None for test in op.when.tests)
        return max(1, sum(len(op.sites) for op in self.ops) + sum(len(test.detector.parts) for test in tests))

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the prompt must be computed in a single step."""
        return any(op.averages_prompt for op in self.ops)

    def encode(self) -> bytes:
        """Return the plan as msgpack, without its tensors."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> RequestPlan:
        """Decode the output of ``encode``; raise msgspec.ValidationError on anything else."""
        return _DECODER.decode(data)


class CompiledRequest(msgspec.Struct, frozen=True):
    """A plan and its tensors, as admission passes them to the engine.

    Attributes:
        plan: The plan.
        tensors: Content of every tensor the plan names, by key.
        reads_prompt: Whether an operation needs values or keys of prompt positions, so that the
            prefix cache must not be read.
    """

    plan: RequestPlan
    tensors: dict[str, TensorData]
    reads_prompt: bool


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RequestPlan)
