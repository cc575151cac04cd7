"""Serialization of features' activations as JSON, with their labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from api_schemas.dictionaries import LabelReader, NamedDictionary
from api_schemas.interventions import Intervention
from api_schemas.operations import Features
from app.json_text import Rows
from nnsight_engine.plans.collect.results import CollectedFeatures
from nnsight_engine.plans.compile.features import check_labels


class LabelBudget:
    """The bytes of labels that one answer may have; the engine's limits count activations only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._taken = 0

    def take(self, num_bytes: int, name: str) -> None:
        self._taken += num_bytes
        check_labels(self._taken, self._max_bytes, name)


async def features_json(
    result: CollectedFeatures, operations: Sequence[Intervention], budget: LabelBudget
) -> dict[str, Any]:
    """Raise ApiError ``capture_too_large`` if the labels exceed the budget of the answer."""
    active = result.ids[result.activations != 0.0] if result.drops_zeros else result.ids
    features, counts = np.unique(active, return_counts=True)
    reader = _reader(result.name, operations)
    labels = {} if reader is None else await reader.of(features.tolist())
    sizes = [len(labels[one].encode()) if one in labels else 0 for one in features.tolist()]
    budget.take(int(np.dot(sizes, counts)), result.name)

    def made(start: int, stop: int) -> Iterator[list[dict[str, Any]]]:
        for row in result.rows(start, stop):
            yield [{"id": one, "label": labels.get(one), "activation": value} for one, value in row]

    rows = Rows(len(result.ids), result.ids.shape[1], made)
    return {"type": "features", "positions": result.positions, "features": rows}


def _reader(name: str, operations: Sequence[Intervention]) -> LabelReader | None:
    for one in operations:
        if isinstance(one, Features) and one.name == name and isinstance(one.dictionary, NamedDictionary):
            return one.dictionary.labels
    return None


__all__ = ["LabelBudget", "features_json"]
