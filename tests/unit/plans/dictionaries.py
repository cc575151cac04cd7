"""Random dictionaries of the toy model, stored in files, and their definitions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.torch import save_file

from api_schemas.dictionaries import DictionaryUsed, NamedDictionary
from nnsight_engine.features.config import Architecture, Normalization, StoredDictionary
from nnsight_engine.features.dictionary import Dictionary
from tests.unit.features.reference import Reference, some_config, some_tensors
from tests.unit.plans.toy_engine import LAYERS, WIDTH

NUM_FEATURES: Final = 12


@dataclasses.dataclass
class Known:
    """A dictionary: as it is stored, and its definition."""

    stored: StoredDictionary
    plain: Reference

    @property
    def taps(self) -> tuple[int, int]:
        """The taps that it reads and whose value it reconstructs."""
        at, output_at = (int(point.split(".")[1]) + 1 for point in (self.stored.at, self.stored.output_at))
        return at, output_at


def named_dictionary(name: str, known: Known) -> NamedDictionary:
    """Return what a dictionary's name resolves to."""
    return NamedDictionary.of(DictionaryUsed(name=name, version=1, id=name), known.stored, None)


def some_dictionary(seed: int, folder: Path, architecture: Architecture) -> Known:
    chance = np.random.default_rng(seed)
    normalization = list(Normalization)[seed % 4]
    if architecture.is_transcoder and normalization is Normalization.EXPECTED_AVERAGE:
        normalization = Normalization.NONE
    config = some_config(
        chance,
        architecture,
        input_width=WIDTH,
        output_width=WIDTH,
        num_features=NUM_FEATURES,
        k=3 if architecture is Architecture.TOPK else None,
        normalization=normalization,
        input_factor=0.5,
    )
    tensors = {name: one.contiguous() / 2 for name, one in some_tensors(chance, config).items()}
    path = folder / f"{architecture}-{seed}.safetensors"
    save_file(tensors, path)
    layer = int(chance.integers(LAYERS))
    output_layer = min(LAYERS - 1, layer + 1) if architecture.is_transcoder else layer
    at, output_at = f"layers.{layer}.output", f"layers.{output_layer}.output"
    stored = StoredDictionary(config, at, output_at, path.name, str(path), "float32")
    return Known(stored, Reference(Dictionary(config, tensors)))
