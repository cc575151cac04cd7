"""Serialization of features' activations as JSON, with their labels."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from api_schemas.dictionaries import LabelReader, NamedDictionary
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from api_schemas.interventions import Intervention
from api_schemas.operations import Features
from nnsight_engine.plans.collect.results import CollectedFeatures

_SMALL: Final = 10_000
"""More activations are converted in a thread, off the event loop."""


class LabelBudget:
    """The bytes of labels that one answer may have; the engine's limits count activations only.

    Args:
        max_bytes: Their limit.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes

    def take(self, num_bytes: int, name: str) -> None:
        """Count the labels of the result with a name; raises ApiError ``capture_too_large``."""
        self._left -= num_bytes
        if self._left < 0:
            raise ApiError(
                ErrorCode.CAPTURE_TOO_LARGE,
                f"With the labels of the features in {clip(name)!r} the answer's labels exceed "
                f"{self._max_bytes} bytes, the limit of captures; ask for fewer features or positions.",
            )


async def features_json(
    result: CollectedFeatures, operations: Sequence[Intervention], budget: LabelBudget
) -> dict[str, Any]:
    """Return a result of ``features`` as JSON.

    Args:
        result: The result.
        operations: The operations of its prompt; the one of its name has the dictionary.
        budget: The bytes of labels that its answer may still have.

    Raises:
        ApiError: ``capture_too_large``: the labels are too large.
    """
    is_small = sum(map(len, result.rows)) <= _SMALL
    counts = _counts(result) if is_small else await asyncio.to_thread(_counts, result)
    reader = _reader(result.name, operations)
    labels = {} if reader is None else await reader.of(sorted(counts))
    budget.take(sum(len(label.encode()) * counts[one] for one, label in labels.items()), result.name)
    return _json(result, labels) if is_small else await asyncio.to_thread(_json, result, labels)


def _counts(result: CollectedFeatures) -> Counter[int]:
    return Counter(feature for row in result.rows for feature, _ in row)


def _json(result: CollectedFeatures, labels: Mapping[int, str]) -> dict[str, Any]:
    return {
        "type": "features",
        "positions": result.positions,
        "features": [
            [
                {"id": one, "label": labels.get(one), "activation": finite_or_none(activation)}
                for one, activation in row
            ]
            for row in result.rows
        ],
    }


def finite_or_none(value: float) -> float | None:
    """Return a number as JSON can hold it: null means that it overflowed; 0 would be a wrong value."""
    return value if math.isfinite(value) else None


def _reader(name: str, operations: Sequence[Intervention]) -> LabelReader | None:
    for one in operations:
        if isinstance(one, Features) and one.name == name and isinstance(one.dictionary, NamedDictionary):
            return one.dictionary.labels
    return None


__all__ = ["LabelBudget", "features_json", "finite_or_none"]
