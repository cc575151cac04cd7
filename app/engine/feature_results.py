"""Serialization of features' activations as JSON, with their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from api_schemas.dictionaries import LabelReader, NamedDictionary
from api_schemas.interventions import Intervention
from api_schemas.operations import Features
from nnsight_engine.plans.collect.results import CollectedFeatures


async def features_json(result: CollectedFeatures, operations: Sequence[Intervention]) -> dict[str, Any]:
    """Return a result of ``features`` as JSON.

    Args:
        result: The result.
        operations: The operations of its prompt; the one of its name has the dictionary.
    """
    reader, labels = _reader(result.name, operations), dict[int, str]()
    if reader is not None:
        labels = await reader.of(sorted({feature for row in result.rows for feature, _ in row}))
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
