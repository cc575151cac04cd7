"""Results of one choice as numbers and arrays, without torch, ready for conversion to JSON.

Positions are absolute, ascending and unique, and every list beside them has one entry per position.
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
    """Values by point, ``[positions, *leaf shape]``; reduced, ``[*leaf shape]`` if there are positions."""

    name: str
    positions: list[int]
    reduce: str
    points: dict[str, TensorResult]


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedProbe:
    name: str
    positions: list[int]
    points: dict[str, FloatArray]


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedScores:
    name: str
    positions: list[int]
    scores: FloatArray


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedFeatures:
    """Activations of features, ``[positions, features]``: strongest first, or as the operation has them."""

    name: str
    positions: list[int]
    ids: IntArray
    activations: FloatArray
    drops_zeros: bool

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[list[tuple[int, float]]]:
        """Yield the features of each position, with their activations."""
        ids, activations = (array[start:stop].tolist() for array in (self.ids, self.activations))
        for row_ids, row_activations in zip(ids, activations, strict=True):
            row = zip(row_ids, row_activations, strict=True)
            yield [feature for feature in row if feature[1] != 0.0] if self.drops_zeros else list(row)


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedMarks:
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
    """The lens of one layer, ``[positions, top_k]`` best first; of targets ``[positions, targets]``."""

    ids: IntArray
    logprobs: FloatArray
    targets: tuple[int, ...]
    target_logprobs: FloatArray
    ranks: IntArray

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[LensRow]:
        """Yield the tokens of each position, of a part of the positions."""
        arrays = (self.ids, self.logprobs, self.target_logprobs, self.ranks)
        for ids, logprobs, of_targets, ranks in zip(
            *(array[start:stop].tolist() for array in arrays), strict=True
        ):
            yield (
                list(map(CollectedToken, ids, logprobs)),
                list(map(CollectedToken, self.targets, of_targets, ranks)),
            )


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedLens:
    name: str
    positions: list[int]
    layers: dict[int, LensRows]


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedTrace:
    """Saved values and printed text of a trace, or the part that is new: JSON types and ``TensorResult``.

    ``grown`` are items appended to saved lists since the last part.
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
    """The points and positions at which one operation took effect; without a condition, ``decides`` is None.

    For each test it is the position that it decides for: the ``same`` as it reads, or the ``next``.
    """

    op: str
    at: list[str]
    positions: list[int]
    decides: list[str] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedResults:
    """All results of one choice, complete or one token's part of a stream.

    The fields below ``final`` are valid only in the last part. Of the effects of a trace (``is_code``) only
    the tier is known.
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
