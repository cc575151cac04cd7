"""Results of one choice as numbers and arrays, without torch, ready for conversion to JSON.

The engine builds them from the worker's records, with each token of a stream or once at the
end; the server converts them to the response's ``interventions`` object. Positions are absolute,
ascending and unique, and every list beside them has one entry per position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorResult:
    """A tensor's content, little-endian and contiguous; ``dtype`` is the torch name."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedCapture:
    """Values of one capture.

    Attributes:
        name: Key of the result.
        positions: The captured positions, or those that went into the reduction.
        reduce: ``none``, ``mean`` or ``last``.
        points: By point, ``[positions, *leaf shape]``; reduced, ``[*leaf shape]`` if there are positions.
    """

    name: str
    positions: list[int]
    reduce: str
    points: dict[str, TensorResult]


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedProbe:
    """One number per position, by point."""

    name: str
    positions: list[int]
    points: dict[str, FloatArray]


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedScores:
    """A detector's score at each position."""

    name: str
    positions: list[int]
    scores: FloatArray


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedFeatures:
    """Activations of a dictionary's features at each position.

    Attributes:
        name: Key of the result.
        positions: The positions.
        ids: Ids of features, ``[positions, features]``: the strongest first, or those that the operation
            names, in its order.
        activations: Their activations, in the same shape.
        drops_zeros: Whether features with an activation of 0 are left out.
    """

    name: str
    positions: list[int]
    ids: IntArray
    activations: FloatArray
    drops_zeros: bool

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[list[tuple[int, float]]]:
        """Yield pairs of a feature's id and its activation, for each position of a range."""
        ids, activations = (one[start:stop].tolist() for one in (self.ids, self.activations))
        for pair in zip(ids, activations, strict=True):
            row = zip(*pair, strict=True)
            yield [one for one in row if one[1] != 0.0] if self.drops_zeros else list(row)


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedMarks:
    """The positions where the condition of an operation of kind ``stop`` or ``flag`` holds."""

    name: str
    kind: str
    positions: list[int]


class CollectedToken(NamedTuple):
    """A token in a lens result: natural log-probability, and for targets its rank (1 = most likely)."""

    id: int
    logprob: float
    rank: int | None = None


LensRow = tuple[list[CollectedToken], list[CollectedToken]]
"""One position: the most likely tokens, best first, and the targets in the requested order."""


@dataclasses.dataclass(frozen=True, slots=True)
class LensRows:
    """The lens of one layer.

    Attributes:
        ids: The most likely tokens, best first, ``[positions, top_k]``.
        logprobs: Their log-probabilities.
        targets: The targets' tokens.
        target_logprobs: Their log-probabilities, ``[positions, targets]``.
        ranks: Their ranks.
    """

    ids: IntArray
    logprobs: FloatArray
    targets: tuple[int, ...]
    target_logprobs: FloatArray
    ranks: IntArray

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[LensRow]:
        """Yield the rows of a range."""
        arrays = (self.ids, self.logprobs, self.target_logprobs, self.ranks)
        for ids, logprobs, of_targets, ranks in zip(
            *(one[start:stop].tolist() for one in arrays), strict=True
        ):
            yield (
                list(map(CollectedToken, ids, logprobs)),
                list(map(CollectedToken, self.targets, of_targets, ranks)),
            )


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedLens:
    """Lens results by layer."""

    name: str
    positions: list[int]
    layers: dict[int, LensRows]


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedTrace:
    """Saved values and printed text of a trace, either all of them or the part that is new.

    Attributes:
        name: Key of the result.
        saves: Saved values as JSON types, with a ``TensorResult`` for each tensor.
        grown: Items appended to saved lists since the last part, in the same form.
        printed: Printed text.
        warnings: Warnings for the author of the trace.
    """

    name: str
    saves: dict[str, Any]
    grown: dict[str, list[Any]]
    printed: str
    warnings: tuple[str, ...] = ()


CollectedResult = (
    CollectedCapture
    | CollectedProbe
    | CollectedLens
    | CollectedScores
    | CollectedFeatures
    | CollectedMarks
    | CollectedTrace
)


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedSites:
    """The points and positions at which one operation took effect.

    ``decides`` says for which position each test of its condition decides, the ``same`` as it reads or the
    ``next``; None without a condition.
    """

    op: str
    at: list[str]
    positions: list[int]
    decides: list[str] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedResults:
    """All results of one choice, complete or one token's part of a stream.

    Attributes:
        results: In the order of the request's operations.
        final: Whether this is the last part; the fields below are valid only then.
        is_code: Whether the results are those of a trace; of its effects only the tier is known.
        applied: One entry per operation.
        fingerprint: Hash over the writes (hex), empty without writes.
        cached_tokens: Prompt tokens whose keys and values came from the prefix cache.
        recomputed_tokens: Positions computed more than once, after a preemption.
        tier: How the steps ran, ``tap`` or ``eager``.
        drafted_rows: Rows computed for drafts of speculative decoding.
        refused_rows: Those of them that do not count, since their draft was refused, or lies behind a stop.
    """

    results: Sequence[CollectedResult]
    final: bool = True
    is_code: bool = False
    applied: list[CollectedSites] = dataclasses.field(default_factory=list)
    fingerprint: str = ""
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    tier: str = ""
    drafted_rows: int = 0
    refused_rows: int = 0
