"""One request's interventions as the worker receives them; only ``plans.compile`` builds plans.

The worker trusts their structure. Tensors are named by the hash of their content, to be shared by requests.
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
    """The first nine write, the others read; STOP and FLAG read whether their condition holds."""

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
    """The absolute positions that an operation matches; all conditions must hold, and not ``exclude``.

    Attributes:
        phase: ``all``, ``prompt`` (below the prompt's length) or ``generated``.
        positions: Sorted, or None for any; in a vision encoder numbers of rows.
        part: Part of the answer, see ``answer_parts``; 0 for any or none.
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
        sites: In the order of the request's ``at``, no site twice.
        name: Key of the operation's result; empty for writes.
        scale: ADD, NORM_MATCH, REPLACE: factor on the vector; PROJECT, SUBSPACE: the part that is removed of
            the value's component along the vector, or in the span of the vectors.
        tensor: Key of its tensor, see ``TensorData.key``. Steer vectors, probe weights and ablation values:
            ``[width]`` for all sites or ``[sites, width]``; PATCH: ``[positions, width]`` or
            ``[sites, positions, width]`` in the order of ``where.positions``; SUBSPACE: an orthonormal basis,
            ``[k, width]`` or ``[sites, k, width]``, whose last rows may be zeros.
        offset: PROJECT: added to the component, which is then clamped to ``low`` and ``high``.
        units: Selected units of the flattened width for ZERO, MEAN, REPLACE; None for all.
        bias: PROBE: added to each dot product.
        targets: LENS: token ids whose log-probability and rank are reported.
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
        return self.sites[0].leaf == PATTERN

    @property
    def captures_states(self) -> bool:
        return self.sites[0].leaf == STATE


class PlannedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image's positions, and the number of its rows in the vision encoder, which count over all images."""

    spans: tuple[tuple[int, int], ...]
    num_rows: int


class RequestPlan(msgspec.Struct, frozen=True):
    """All operations of a request on one prompt.

    Attributes:
        fingerprint: Hash over the writes (hex), the base of the cache salt; empty without writes.
        answer: None if no operation names a part of the answer.
        images: Empty if no operation acts in the vision encoder.
        works: The work of operations, by index, if together they have much, see ``plans.work``.
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
        return any(op.averages_prompt for op in self.ops)

    def encode(self) -> bytes:
        """Return the plan as msgpack, without its tensors."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> RequestPlan:
        """Decode the output of ``encode``; raise msgspec.ValidationError on anything else."""
        return _DECODER.decode(data)


class CompiledRequest(msgspec.Struct, frozen=True):
    """A plan and its tensors by key; ``reads_prompt`` forbids that the prefix cache is read."""

    plan: RequestPlan
    tensors: dict[str, TensorData]
    reads_prompt: bool


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RequestPlan)
