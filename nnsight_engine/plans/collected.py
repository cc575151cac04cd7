"""What one choice's reads brought back: plain values, no torch, ready to become JSON.

The engine builds these from the worker's records, with each token in a stream or once at the
end; the server turns them into the answer's ``interventions`` object. Positions are absolute
and ascending, each once, and every list beside them has one entry per position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class TensorResult:
    """A tensor's content, little-endian and contiguous; ``dtype`` as torch names it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureResult:
    """Values of one capture.

    Attributes:
        name: Key of the result.
        positions: The positions captured, or that went into the reduction.
        reduce: ``none``, ``mean`` or ``last``.
        points: By point, ``[positions, *leaf shape]``; reduced, ``[*leaf shape]`` where there are positions.
    """

    name: str
    positions: list[int]
    reduce: str
    points: dict[str, TensorResult]


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeResult:
    """One number per position, by point."""

    name: str
    positions: list[int]
    points: dict[str, list[float]]


@dataclasses.dataclass(frozen=True, slots=True)
class LensToken:
    """A token under the lens: natural log-probability, and its rank (1 = most likely) where asked."""

    id: int
    logprob: float
    rank: int | None = None


LensRow = tuple[list[LensToken], list[LensToken]]
"""One position: the most likely tokens, best first, and the targets in the order asked."""


@dataclasses.dataclass(frozen=True, slots=True)
class LensResult:
    """The lens at each layer: one row per position."""

    name: str
    positions: list[int]
    layers: dict[int, list[LensRow]]


@dataclasses.dataclass(frozen=True, slots=True)
class TraceResult:
    """What a trace's code has saved and printed, all of it or what is new.

    Attributes:
        name: Key of the result.
        saves: In JSON's types, with a ``TensorResult`` wherever a tensor stands.
        grown: Items that lists have grown by, likewise.
        printed: What it printed.
        warnings: What its author is to be warned of.
    """

    name: str
    saves: dict[str, Any]
    grown: dict[str, list[Any]]
    printed: str
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """Where one operation took effect: its points, and the positions it met there."""

    op: str
    at: list[str]
    positions: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedResults:
    """Everything one choice brought back, whole or one token's part of a stream.

    Attributes:
        results: In the order of the request's operations.
        final: Whether this is the last part; only then do the fields below mean anything.
        is_code: Whether it is of a trace, of whose doings nothing is known but the tier.
        applied: One entry per operation.
        fingerprint: Hash over the writes (hex), empty without any.
        cached_tokens: Prompt tokens whose keys and values came from the prefix cache.
        recomputed_tokens: Positions computed more than once, after a preemption.
        tier: How the steps ran, ``tap`` or ``eager``.
    """

    results: Sequence[CaptureResult | ProbeResult | LensResult | TraceResult]
    final: bool = True
    is_code: bool = False
    applied: list[Applied] = dataclasses.field(default_factory=list)
    fingerprint: str = ""
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    tier: str = ""
