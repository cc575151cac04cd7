"""One request's interventions as the worker receives them: resolved, checked, plain data.

``plans.compile`` builds a plan out of a request's JSON, the only place that may; the worker
trusts its shape. Points are resolved to single sites, positions are absolute, tensors are
named by the hash of their content, so that a vector shared by many requests is held once.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Final

import msgspec

from nnsight_engine.core.model_spec import PATTERN_LEAF

PLAN_KEY: Final = "nnsight_engine"
"""Key of our entry in vLLM's ``SamplingParams.extra_args``."""


class OperationKind(enum.StrEnum):
    """What one operation does at its sites; the first eight write, the others read."""

    ADD = "add"
    NORM_MATCH = "norm_match"
    PROJECT_OUT = "project_out"
    CLAMP = "clamp"
    REPLACE = "replace"
    ZERO = "zero"
    MEAN = "mean"
    PATCH = "patch"
    CAPTURE = "capture"
    PROBE = "probe"
    LENS = "logit_lens"


READS: Final = frozenset({OperationKind.CAPTURE, OperationKind.PROBE, OperationKind.LENS})


class PlannedSite(msgspec.Struct, frozen=True, array_like=True):
    """One place in the model: a leaf name of ``ModelSpec`` and its layer, -1 where it has none."""

    leaf: str
    layer: int = -1

    def __str__(self) -> str:
        """Return the point's string form, ``layers.3.attn.q`` or ``logits``."""
        return self.leaf if self.layer < 0 else f"layers.{self.layer}.{self.leaf}"


class WhereRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which absolute positions an operation names; all conditions hold together.

    Attributes:
        phase: ``all``, ``prompt`` (below the prompt's length) or ``generated``.
        positions: Absolute positions, sorted, or None for any.
        start: First position of the half-open range.
        stop: End of the half-open range, None for open.
        tokens: Ids of the input token at the position, or None for any.
        exclude: Positions that this rule names are taken out.
    """

    phase: str = "all"
    positions: tuple[int, ...] | None = None
    start: int = 0
    stop: int | None = None
    tokens: tuple[int, ...] | None = None
    exclude: WhereRule | None = None


class TensorData(msgspec.Struct, frozen=True):
    """A tensor's bytes, little-endian and contiguous; ``dtype`` as torch names it (``float32``)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def key(self) -> str:
        """Return the hash of the content, by which plans name the tensor (64 hex digits)."""
        head = f"{self.dtype}:{','.join(map(str, self.shape))}:".encode()
        return hashlib.sha256(head + self.data).hexdigest()


class PlannedOp(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation, at one or more sites, in the order the request gave.

    Attributes:
        kind: What it does.
        sites: Where in the model, in the order of the request's ``at``, no site twice.
        where: Which positions.
        name: Key of the operation's result; empty for writes.
        scale: ADD, NORM_MATCH, PROJECT_OUT, REPLACE: factor on the vector; CLAMP: the projection.
        tensor: Key in ``RequestPlan.tensors``. Steer vectors, probe weights and ablation values:
            ``[width]`` for all sites or ``[sites, width]``; PATCH: ``[positions, width]`` or
            ``[sites, positions, width]`` in the order of ``where.positions``.
        units: Selected units of the flat width for ZERO, MEAN, REPLACE; None for all.
        reduce: CAPTURE: ``none``, ``mean`` or ``last``.
        dtype: CAPTURE: torch name of the result's dtype.
        bias: PROBE: added to each dot product.
        top_k: LENS: tokens per position.
        targets: LENS: token ids whose log-probability and rank are reported.
    """

    kind: OperationKind
    sites: tuple[PlannedSite, ...]
    where: WhereRule = WhereRule()
    name: str = ""
    scale: float = 1.0
    tensor: str = ""
    units: tuple[int, ...] | None = None
    reduce: str = "none"
    dtype: str = ""
    bias: float = 0.0
    top_k: int = 0
    targets: tuple[int, ...] = ()

    @property
    def reads(self) -> bool:
        """Whether the operation leaves the model's values alone."""
        return self.kind in READS

    @property
    def captures_patterns(self) -> bool:
        """Whether the operation captures attention patterns, which share it with no other points."""
        return self.sites[0].leaf == PATTERN_LEAF


class RequestPlan(msgspec.Struct, frozen=True):
    """All operations of one prompt's request.

    Attributes:
        prompt_len: Tokens of the prompt; positions from here on are generated.
        ops: The operations, in the order given.
        stream: Whether results leave with each token, or all at the end.
        fingerprint: Hash over the writes (hex), the base of the cache salt; empty without writes.
    """

    prompt_len: int
    ops: tuple[PlannedOp, ...]
    stream: bool = False
    fingerprint: str = ""

    @property
    def num_points(self) -> int:
        """At how many points its operations act, each counted with its points; at least one."""
        return max(1, sum(len(op.sites) for op in self.ops))

    def encode(self) -> bytes:
        """Return the plan as msgpack, without its tensors."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> RequestPlan:
        """Read what ``encode`` wrote; raises msgspec.ValidationError on anything else."""
        return _DECODER.decode(data)


class CompiledRequest(msgspec.Struct, frozen=True):
    """A plan and the tensors it names: what admission hands to the engine.

    Attributes:
        plan: The plan.
        tensors: Content of every tensor the plan names, by key.
        reads_prompt: Whether a read may name prompt positions, or needs their keys, so that the
            prefix cache must not be read.
        prompt_bytes: Captured bytes that the prompt alone is sure to need.
    """

    plan: RequestPlan
    tensors: dict[str, TensorData]
    reads_prompt: bool
    prompt_bytes: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RequestPlan)
