"""A dictionary with random weights, in a file as a server keeps it, for operations on features."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from api_schemas.dictionaries import DictionaryUsed, NamedDictionary
from nnsight_engine.features.config import Architecture, DictionaryConfig, StoredDictionary

_EXPANSION = 16
"""Features for each number of the width."""


@functools.cache
def random_dictionary(layer: int, width: int) -> NamedDictionary:
    """Return a sparse autoencoder of the values after a layer, as a request's resolved name."""
    config = DictionaryConfig(Architecture.STANDARD, width, _EXPANSION * width, width)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) / width**0.5
        for name, shape in config.tensor_shapes.items()
    }
    path = Path(_folder().name) / f"{layer}.safetensors"
    save_file(tensors, path)
    at = f"layers.{layer}.output"
    stored = StoredDictionary(config, at, at, f"random {layer}", str(path), "float32")
    return NamedDictionary.of(DictionaryUsed(name="random", version=1, id="random"), stored)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dictionaries-")
