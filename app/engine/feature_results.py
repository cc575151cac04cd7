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


async def features_json(
    result: CollectedFeatures, operations: Sequence[Intervention], max_label_bytes: int
) -> dict[str, Any]:
    """Return a result of ``features`` as JSON.

    Args:
        result: The result.
        operations: The operations of its prompt; the one of its name has the dictionary.
        max_label_bytes: Maximum size of all labels; the engine's limits count activations only.

    Raises:
        ApiError: ``capture_too_large``: the labels are too large.
    """
    counts = Counter(feature for row in result.rows for feature, _ in row)
    reader = _reader(result.name, operations)
    labels = {} if reader is None else await reader.of(sorted(counts))
    num_bytes = sum(len(label.encode()) * counts[one] for one, label in labels.items())
    if num_bytes > max_label_bytes:
        raise ApiError(
            ErrorCode.CAPTURE_TOO_LARGE,
            f"The labels of the features in {clip(result.name)!r} have {num_bytes} bytes, and may have "
            f"{max_label_bytes}, as captures may; ask for fewer features or positions.",
        )
    if counts.total() <= _SMALL:
        return _json(result, labels)
    return await asyncio.to_thread(_json, result, labels)


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


__all__ = ["features_json", "finite_or_none"]
